"""Order of requests, fairness, failures and dispatch."""

from __future__ import annotations

import numpy as np

from experiments.reproduce.claims.shipped import run_result, run_summary, summary

E2E = "e2e.mean_s"
SHAREGPT = (  # as in FastServe's artifact; means of vLLM's benchmark, which has the same filter; cv assumed
    "model=llama2_13b",  # as large as OPT-13B, with as much KV
    "hardware=a100_40gb_sxm",
    "workload=synthetic",
    "workload.num_requests=400",
    "workload.lengths.prompt_tokens.mean=217",
    "workload.lengths.prompt_tokens.cv=1.2",
    "workload.lengths.output_tokens.mean=200",
    "workload.lengths.output_tokens.cv=1",
    "workload.max_tokens=2048",
    "engine.max_model_len=2048",
    "engine.max_num_batched_tokens=2048",
    "slo=none",
)
FIRST_COME = ("scheduling=fcfs", "engine.max_num_seqs=16")
FEEDBACK = (
    "scheduling=mlfq",
    "scheduling.quantum_tokens=1",
    "scheduling.num_levels=12",
    "scheduling.prompt_token_service=0.007",  # 0.15 ms of prefill per prompt token, 23 ms per decode of 16
    "scheduling.starvation_s=24",  # it looks for starved requests every 1,000 iterations
    "scheduling.max_active=16",
    "scheduling.preemption_mode=swap",
    "engine.swap_space_gib=56",
    "engine.max_num_seqs=1024",
)
MOST_S_PER_TOKEN = 0.3
ALPACA = (  # lengths of Alpaca, as in `beam_search`
    "workload.lengths.prompt_tokens.mean=19",
    "workload.lengths.prompt_tokens.cv=0.7",
    "workload.lengths.output_tokens.mean=58",
    "workload.num_requests=2000",
    "engine.max_num_seqs=2048",
)

PIPELINE = (
    "model=llama2_70b",
    "model.config.num_key_value_heads=64",
    "model.config.intermediate_size=22016",
    "hardware=a100_80gb_sxm",
    "pipeline_parallel_size=4",
    "replicas=2",
    "routing=weighted",
    "routing.weights=[1000,1]",  # all requests go to the first pipeline
    "workload=offline_batch",
    "workload.num_requests=32",
    "workload.lengths.prompt_tokens.mean=500",
    "workload.lengths.prompt_tokens.cv=0.01",
    "workload.lengths.output_tokens.mean=1000",
    "workload.lengths.output_tokens.cv=0.01",
    "engine.max_num_seqs=64",
    "slo=none",
)


def s3() -> float:
    """Returns the throughput with regions of the predicted length over that with the longest ones."""
    known, longest = (
        summary("contiguous_vs_paged", arm, *ALPACA)["throughput.output_tokens_per_s"]
        for arm in ("orca_oracle", "orca_max")
    )
    return known / longest


def fastserve(seed: int) -> float:
    """Returns the rate within the limit with the feedback queue over that of first come, first served."""
    feedback = _rate_within(FEEDBACK, (4, 6, 8, 10, 12, 14), seed)
    return feedback / _rate_within(FIRST_COME, (2, 3, 4, 5), seed)


def _rate_within(scheduling: tuple[str, ...], rates_per_s: tuple[float, ...], seed: int) -> float:
    """Returns the rate, between these, at which the mean of E2E / output tokens is `MOST_S_PER_TOKEN`."""
    found = []
    for rate_per_s in rates_per_s:
        rate = f"workload.arrivals.rate_per_s={rate_per_s}"
        requests = run_result(*SHAREGPT, rate, *scheduling, seed=seed).requests
        found.append(float((requests["e2e_s"] / requests["output_tokens"]).mean()))
    return float(np.interp(MOST_S_PER_TOKEN, found, rates_per_s))


def dejavu() -> float:
    """Returns the mean of `restarted` over five moments, after 0.1 to 0.9 of the batch's time."""
    return float(np.mean([restarted(share) for share in (0.1, 0.3, 0.5, 0.7, 0.9)]))


def restarted(share: float) -> float:
    """Returns the mean E2E of a batch that starts again after a failure over that with a copy of its KV.

    The only pipeline that has requests fails after this share of the time of the batch without failure.
    """
    at_s = share * run_summary(*PIPELINE, "failures=none")[E2E]
    crash = ("failures=crash", f"failures.events.0.at_s={at_s}")
    again, copied = (run_summary(*PIPELINE, *crash, f"recovery={way}")[E2E] for way in ("scratch", "kv"))
    return again / copied


def shares(arm: str) -> float:
    """Returns the requests/s of the tenant that sends twice as much over those of the other."""
    found = summary("fair_shares", arm, "workload.tenants={large:2,small:1}")
    large, small = (found[f"by_tenant.{tenant}.throughput.requests_per_s"] for tenant in ("large", "small"))
    return large / small
