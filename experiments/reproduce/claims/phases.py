"""Prefill and decode: on replicas of their own, in chunks, and what latency limits cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd

from experiments.papers.distserve import (
    APPLICATIONS,
    Engine,
    attained_as_published,
    gain,
)
from experiments.papers.phase_layouts import Search, largest_rate
from experiments.papers.splitwise import A100, BLOOM, LENGTHS, PRICES, Design, Trial, write_requests
from experiments.reproduce.claims.built import lengths_of
from experiments.reproduce.claims.shipped import run_summary, summary

NUM_REQUESTS = 200
BY_NAME = {application.name: application for application in APPLICATIONS}
PROMPTS_FIRST = "batching=prefill_first"


def _lengths(prompt: float, output: float) -> tuple[str, ...]:
    return (
        f"workload.lengths.prompt_tokens.mean={prompt}",
        f"workload.lengths.output_tokens.mean={output}",
    )


def _limits(ttft_ms: float, tpot_ms: float) -> tuple[str, ...]:
    return f"slo.ttft_ms={ttft_ms}", f"slo.tpot_ms={tpot_ms}"


def best_ratio(experiment: str, rate_per_s: int, num_prefill: Sequence[int]) -> float:
    """Returns the ratio of prefill to decode replicas, of six, with the most requests within the SLO."""
    at = f"workload.arrivals.rate_per_s={rate_per_s}"
    shares = {
        prefill / (6 - prefill): summary(experiment, f"p{prefill}_d{6 - prefill}", at)["goodput.share"]
        for prefill in num_prefill
    }
    return max(shares, key=lambda ratio: shares[ratio])


def splitwise() -> float:
    """Returns requests/s of 9 prompt and 5 token machines over 14 co-located ones, all DGX-A100."""
    duration_s, most = 100.0, 40
    uniform = np.random.default_rng(0).random((2, 20_000))
    drawn = lengths_of("azure_conv_2023")
    table = pd.DataFrame(
        {
            name: np.interp(u, part.probabilities, part.values).round().clip(1).astype(int)
            for name, u, part in zip(
                LENGTHS, uniform, (drawn.prompt_tokens, drawn.output_tokens), strict=True
            )
        }
    )
    prices = PRICES["splitwisesim"]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "requests.csv"
        write_requests(path, table, int(duration_s * most), 0)
        trial = Trial(path, duration_s, prices.timed, [*BLOOM, *prices.overrides])
        apart = trial.rate(Design("Splitwise-AA", A100, 9, A100, 5))
        return apart / trial.rate(Design("Baseline-A100", A100, 14))


def sarathi() -> float:
    """Returns the capacity with chunked prefill over that of vLLM of 2023, with a strict limit on ITL."""
    base = (
        "model=mistral_7b",
        "hardware=a100_80gb_sxm",
        "engine=vllm_v0",
        "workload=synthetic",
        "workload.lengths.prompt_tokens.mean=2666",
        "workload.lengths.prompt_tokens.cv=1.17",
        "workload.lengths.output_tokens.mean=481",
        "workload.lengths.output_tokens.cv=0.59",
        "engine.max_model_len=8192",
        "slo=none",
    )

    def rate(*arm: str) -> float:
        def holds(rate_per_s: float) -> bool:
            num_requests = max(NUM_REQUESTS, int(60 * rate_per_s))
            traffic = (f"workload.arrivals.rate_per_s={rate_per_s}", f"workload.num_requests={num_requests}")
            found = run_summary(*base, *arm, *traffic)
            return found["itl.p99_s"] <= 0.1 and found["queue.p50_s"] <= 2

        return largest_rate(holds)

    return rate("batching=sarathi", "engine.max_num_batched_tokens=512") / rate(PROMPTS_FIRST)


def looser() -> float:
    """Returns the capacity with loose limits on TTFT and TPOT over that with tight ones."""
    chat = ("model=llama3_1_8b", "hardware=h100_sxm", "workload=synthetic", *_lengths(1024, 256))
    tight, loose = (
        Search([*chat, *_limits(ttft_ms, tpot_ms)], NUM_REQUESTS).rate()
        for ttft_ms, tpot_ms in ((200, 12), (2000, 50))
    )
    return loose / tight


def over_vllm(application: str) -> float:
    """Returns DistServe's largest rate per GPU over vLLM's in an application, each with its own times."""
    return gain(BY_NAME[application])


def percent_as_published(application: str, engine: Engine) -> float:
    """Returns the requests within the limits at the published rate, in percent."""
    return 100 * attained_as_published(BY_NAME[application], engine)
