"""Writes a run in the JSON layout of `vllm bench serve --save-result --save-detailed`.

Lists have one element per request, in order of arrival, in seconds; aggregates are in milliseconds. As in
vLLM, a failed request has no tokens, times of 0 s and an error. generated_texts are empty, because the
simulator has no text. A run with draft tokens has the keys spec_decode_*; the rates by position are over the
whole run. Source: vllm/benchmarks/serve.py, `benchmark` and `main`, read in November 2026.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.metrics.definitions import Window
from sim.metrics.dialects import Served, vllm_bench
from sim.metrics.slo import Slo
from sim.metrics.token_times import TokenTimes
from sim.records.table import AnyTable, column
from sim.report.files import write_whole

FILE = "vllm_bench.json"
PERCENTILES = (50, 90, 95, 99)
"""Percentiles of the aggregates, as selected by vLLM's option --metric-percentiles."""
DECIMALS = 9
"""Decimal places of times in seconds: nanoseconds."""


def write_vllm_bench(
    file: Path,
    requests: AnyTable,
    times: TokenTimes,
    window: Window,
    slo: Slo | None,
    model: str,
    speculation: Mapping[str, Any] | None = None,
) -> None:
    """Writes the requests that arrived in the window. requests, times: of the whole run.

    speculation: the section `speculation` of the summary; None: no engine speculates.
    """
    fields = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        **as_vllm_bench(requests, times, window, slo, model),
        **({} if speculation is None else spec_decode_of(speculation)),
    }
    write_whole(file, json.dumps(fields, separators=(",", ":"), allow_nan=False) + "\n")


def as_vllm_bench(
    requests: AnyTable, times: TokenTimes, window: Window, slo: Slo | None, model: str
) -> dict[str, Any]:
    """Returns the content of the file, except for the date."""
    served = Served.of(requests, window, times)
    figures = vllm_bench(served, slo)
    done, num = served.done, len(served.done)
    errors = _errors(requests, window)
    output_tokens = np.where(done, served.output_tokens, 0)
    duration_s = figures.rates["duration_s"].value
    total = int(served.prompt_tokens[done].sum()), int(output_tokens.sum())
    peak_tokens, peak_requests = _peaks(served)
    return {
        "endpoint_type": "simulated",
        "backend": "simulated",
        "label": None,
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": num,
        "request_rate": _rate(served.sent_s),
        "burstiness": None,
        "max_concurrency": None,
        "duration": duration_s,
        "completed": int(done.sum()),
        "failed": int((~done).sum()),
        "total_input_tokens": total[0],
        "total_output_tokens": total[1],
        "request_throughput": _per(int(done.sum()), duration_s),
        "request_goodput": _plain(figures.rates["goodput_per_s"].value) if slo else None,
        "output_throughput": _per(total[1], duration_s),
        "total_token_throughput": _per(sum(total), duration_s),
        "input_lens": served.prompt_tokens.tolist(),
        "output_lens": output_tokens.tolist(),
        "ttfts": _rounded(np.where(done, served.ttft_s, 0.0)),
        "itls": _gaps(served),
        "latencies": _rounded(np.where(done, served.e2e_s, 0.0)),
        "start_times": _rounded(served.sent_s),
        "queue_times": [0.0] * num,
        "generated_texts": [""] * num,
        "errors": errors,
        "max_output_tokens_per_s": peak_tokens,
        "max_concurrent_requests": peak_requests,
        "rtfx": 0.0,
        **_aggregates("ttft", served.ttft_s[done]),
        **_aggregates("tpot", served.per_token_s[done]),
        **_aggregates("itl", served.gaps_of_done),
        **_aggregates("e2el", served.e2e_s[done]),
    }


def spec_decode_of(speculation: Mapping[str, Any]) -> dict[str, Any]:
    """Returns vLLM's metrics of draft tokens; empty if no draft token was verified.

    spec_decode_acceptance_rate is in percent. The rates by position are accepted tokens divided by all
    drafts, including shorter ones. Example: 10 drafts with 20 tokens, of which 8 and 5 are accepted: 65 %,
    2.3 tokens per draft, [0.8, 0.5].
    """
    num_drafts, num_tokens = speculation["drafts"], speculation["draft_tokens"]
    if not num_tokens:
        return {}
    places = speculation["by_place"]
    return {
        "spec_decode_acceptance_rate": 100 * speculation["acceptance_rate"],
        "spec_decode_acceptance_length": speculation["mean_accepted_length"],
        "spec_decode_num_drafts": num_drafts,
        "spec_decode_draft_tokens": num_tokens,
        "spec_decode_accepted_tokens": speculation["accepted_tokens"],
        "spec_decode_per_position_acceptance_rates": [
            place["accepted"] / places[0]["drafted"] for place in places
        ],
    }


def _aggregates(name: str, values_s: NDArray[np.float64]) -> dict[str, float]:
    """Computes the aggregates of a latency, in ms; as in vLLM they are 0 without values."""
    known = values_s[~np.isnan(values_s)] * 1e3
    known = known if len(known) else np.zeros(1)
    return {
        f"mean_{name}_ms": float(known.mean()),
        f"median_{name}_ms": float(np.median(known)),
        f"std_{name}_ms": float(known.std()),
        **{f"p{q}_{name}_ms": float(np.percentile(known, q)) for q in PERCENTILES},
    }


def _gaps(served: Served) -> list[list[float]]:
    found: list[list[float]] = [[] for _ in served.done]
    for row, gap_s in zip(served.gap_row.tolist(), _rounded(served.gap_s), strict=True):
        if served.done[row]:
            found[row].append(gap_s)
    return found


def _errors(requests: AnyTable, window: Window) -> list[str]:
    """Returns the error of each request: its status and reason, or an empty text if it finished."""
    inside = requests[window.holds(column(requests, "arrival_s", np.float64))]
    inside = inside.take(np.argsort(column(inside, "arrival_s"), kind="stable"))
    reasons = column(inside, "reason").tolist() if "reason" in inside else [""] * len(inside)
    return [
        "" if status == "finished" else f"{status}: {reason}" if reason else str(status)
        for status, reason in zip(column(inside, "status").tolist(), reasons, strict=True)
    ]


def _peaks(served: Served) -> tuple[float, int]:
    """Computes the maximum tokens in one second, from the first request on, and the peak concurrency."""
    done = served.done
    if not done.any():
        return 0.0, 0
    zero_s = float(served.sent_s[done].min())
    starts, ends = served.sent_s[done], served.last_s[done]
    change = np.concatenate([np.ones(len(starts)), -np.ones(len(ends))])
    order = np.lexsort((change, np.concatenate([starts, ends])))  # ends come before starts at the same time
    seconds = np.floor(served.token_s[done[served.token_row]] - zero_s).astype(np.int64)
    return float(np.bincount(seconds).max()), int(np.cumsum(change[order]).max())


def _rate(sent_s: NDArray[np.float64]) -> float | str:
    """Computes the request rate, in requests/s; as in vLLM it is "inf" if all requests came at once."""
    span_s = float(sent_s.max() - sent_s.min()) if len(sent_s) else 0.0
    return len(sent_s) / span_s if span_s > 0 else "inf"


def _rounded(values: NDArray[np.float64]) -> list[float]:
    rounded: list[float] = np.round(values, DECIMALS).tolist()
    return rounded


def _per(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _plain(value: float) -> float | None:
    return None if np.isnan(value) else value
