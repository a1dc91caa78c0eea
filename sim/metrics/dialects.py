"""The same run by the definitions of other tools: what their words mean, worked out from each token's time.

What each counts, and how (n: output tokens; first, last: when these tokens came; sent: the arrival):

    tool        answered requests   percentiles      seconds that rates are over
    ours        finished            interpolated     the measured time
    vllm_bench  succeeded           interpolated     start of the benchmark to the last answer
    guidellm    successful          a value that was measured, at most so many below it; weighted
                                                     first request sent to the last answer
    aiperf      valid               interpolated     first valid request sent to its last answer
    mlperf      all, or no result   sorted[n q]      start to the end of the query issued last

    per token   without the first: (last - first) / (n - 1)    with it: (last - sent) / n
    ours        TPOT, n > 1                                    -
    vllm_bench  TPOT, n > 1                                    -
    guidellm    ITL, weighted by n - 1                         TPOT, weighted by n
    aiperf      ITL, n > 1                                     -
    mlperf      TPOT, n > 1                                    -

    every gap   ours and vllm_bench: ITL, of all together; aiperf: ICL; guidellm, mlperf: not reported

Ours counts first tokens of requests that were never finished, and gaps, by when they came; the others count
answered requests, whole. Sources, read in November 2026: vllm/benchmarks/serve.py (calculate_metrics);
guidellm schemas/base/request_stats.py, statistics.py and schemas/benchmark/goodput.py; aiperf
docs/metrics_reference.md and metrics/types; mlcommons/inference loadgen/results.cc and logging.cc (Server
scenario with use_token_latencies).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.metrics.served import Served, Values, interpolated, measured_value, next_value
from sim.metrics.slo import Slo
from sim.metrics.token_times import TokenTimes
from sim.metrics.window import Window

PERCENTILES = (50, 90, 99)


class Latency(NamedTuple):
    """What a tool calls it, and its figures in seconds; NaN where there are none."""

    name: str
    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float


class Rate(NamedTuple):
    """A figure of a whole run, by the name that the tool gives it."""

    name: str
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class InDialect:
    """A run in one tool's words. Keys are ours: two tools under one key mean the same thing."""

    tool: str
    counts: Mapping[str, Rate]
    """answered, failed."""
    latencies: Mapping[str, Latency]
    """ttft, per_token, per_token_with_first, gap, e2e."""
    rates: Mapping[str, Rate]
    """duration_s, requests_per_s, output_tokens_per_s, goodput_per_s, good_share, valid."""

    def to_json(self) -> dict[str, Any]:
        """Plain; NaN stays."""
        figures: dict[str, Latency | Rate] = {**self.counts, **self.latencies, **self.rates}
        return {"tool": self.tool, **{key: figure._asdict() for key, figure in figures.items()}}


Percentile = Callable[[Values, "Values | None", float], float]


def latency(name: str, values: Values, percentile: Percentile, weights: Values | None = None) -> Latency:
    """NaN values are left out; weights: how much each counts."""
    known = ~np.isnan(values)
    if weights is not None:
        known &= weights > 0
        weights = weights[known]
    values = values[known]
    if not len(values):
        return Latency(name, *[float("nan")] * 4)
    mean = float(np.average(values, weights=weights))
    return Latency(name, mean, *(percentile(values, weights, q) for q in PERCENTILES))


def vllm_bench(served: Served, slo: Slo | None) -> InDialect:
    """`vllm bench serve`."""
    done, duration_s = served.done, _last_end_s(served) - served.window.start_s
    good = served.within(slo, one_token=True) if slo else None
    return InDialect(
        tool="vLLM bench",
        counts={
            "answered": Rate("Successful requests", float(done.sum())),
            "failed": Rate("Failed requests", float((~done).sum())),
        },
        latencies={
            "ttft": latency("TTFT", served.ttft_s[done], interpolated),
            "per_token": latency("TPOT", served.per_token_s[done], interpolated),
            "gap": latency("ITL", served.gaps_of_done, interpolated),
            "e2e": latency("E2EL", served.e2e_s[done], interpolated),
        },
        rates={
            "duration_s": Rate("Benchmark duration (s)", duration_s),
            "requests_per_s": Rate("Request throughput (req/s)", _per(done.sum(), duration_s)),
            "output_tokens_per_s": Rate(
                "Output token throughput (tok/s)", _per(served.output_tokens[done].sum(), duration_s)
            ),
            **_good("Request goodput (req/s)", good, duration_s),
        },
    )


def guidellm(served: Served, slo: Slo | None) -> InDialect:
    """guidellm; its goodput leaves out answers of one token where the SLO has a TPOT: they have none."""
    done, tokens = served.done, served.longest_tokens.astype(np.float64)
    start_s = float(served.sent_s.min()) if len(served.sent_s) else served.window.start_s
    duration_s = _last_end_s(served) - start_s
    several = tokens > 1
    # Tokens are spread evenly from the first to the last of an answer; the rate is over all of these spans.
    first_s, last_s = served.first_s[done], served.last_s[done]
    token_span_s = float(last_s.max() - first_s.min()) if len(first_s) else 0.0
    rates = {
        "duration_s": Rate("duration (s)", duration_s),
        "requests_per_s": Rate("requests_per_second", _per(done.sum(), duration_s)),
        "output_tokens_per_s": Rate(
            "output_tokens_per_second", _per(served.output_tokens[done].sum(), token_span_s)
        ),
    }
    if slo is not None:
        good = served.within(slo, one_token=False)
        judged = done & several if "tpot" in slo.limits_s else done
        rates |= _good("goodput (req/s)", good, duration_s)
        rates["good_share"] = Rate("SLO attainment", _per(good.sum(), float(judged.sum())))
    return InDialect(
        tool="guidellm",
        counts={
            "answered": Rate("successful", float(done.sum())),
            "failed": Rate("errored or incomplete", float((~done).sum())),
        },
        latencies={
            "ttft": latency("TTFT", served.ttft_s[done], measured_value),
            "per_token": latency("ITL", served.per_token_s[done], measured_value, tokens[done] - 1),
            "per_token_with_first": latency(
                "TPOT", (served.e2e_s / np.maximum(tokens, 1))[done], measured_value, tokens[done]
            ),
            "e2e": latency("Req Latency", served.e2e_s[done], measured_value),
        },
        rates=rates,
    )


def aiperf(served: Served, slo: Slo | None) -> InDialect:
    """NVIDIA AIPerf; an answer of one token is not good where the SLO has a TPOT, as it has none."""
    done = served.done
    start_s = float(served.sent_s[done].min()) if done.any() else served.window.start_s
    duration_s = _last_end_s(served) - start_s
    rates = {
        "duration_s": Rate("Benchmark Duration (sec)", duration_s),
        "requests_per_s": Rate("Request Throughput (requests/sec)", _per(done.sum(), duration_s)),
        "output_tokens_per_s": Rate(
            "Output Token Throughput (tokens/sec)", _per(served.output_tokens[done].sum(), duration_s)
        ),
    }
    if slo is not None:
        good = served.within(slo, one_token=False)
        rates |= _good("Goodput (requests/sec)", good, duration_s)
        rates["good_share"] = Rate("GoodRequestFraction", _per(good.sum(), float(len(done))))
    return InDialect(
        tool="AIPerf",
        counts={
            "answered": Rate("Request Count", float(done.sum())),
            "failed": Rate("Error Request Count", float((~done).sum())),
        },
        latencies={
            "ttft": latency("TTFT", served.ttft_s[done], interpolated),
            "per_token": latency("ITL", served.per_token_s[done], interpolated),
            "gap": latency("ICL", served.gaps_of_done, interpolated),
            "e2e": latency("Req Lat", served.e2e_s[done], interpolated),
        },
        rates=rates,
    )


def mlperf(served: Served, slo: Slo | None) -> InDialect:
    """MLPerf LoadGen's Server scenario: p99 of TTFT and of TPOT within their limits make a run valid.

    It waits for every query, so of failed ones it knows nothing. A rate of n queries has n - 1 gaps.
    """
    done = served.done
    num = int(done.sum())
    duration_s = float(served.last_s[done][-1]) - served.window.start_s if num else 0.0
    latencies = {
        "ttft": latency("First Token", served.ttft_s[done], next_value),
        "per_token": latency("Output Token", served.per_token_s[done], next_value),
        "e2e": latency("latency", served.e2e_s[done], next_value),
    }
    rates = {
        "duration_s": Rate("final query done (s)", duration_s),
        "requests_per_s": Rate("Completed samples per second", _per(max(num - 1, 0), duration_s)),
        "output_tokens_per_s": Rate(
            "Completed tokens per second", _per(served.output_tokens[done].sum(), duration_s)
        ),
    }
    limits_s = slo.limits_s if slo else {}
    asked = [
        (key, limits_s[term]) for key, term in (("ttft", "ttft"), ("per_token", "tpot")) if term in limits_s
    ]
    if asked:
        is_valid = done.all() and all(latencies[key].p99_s <= limit_s for key, limit_s in asked)
        rates["valid"] = Rate("Result is VALID", float(is_valid))
    return InDialect(
        tool="MLPerf",
        counts={
            "answered": Rate("samples", float(num)),
            "failed": Rate("never completed", float(len(done) - num)),
        },
        latencies=latencies,
        rates=rates,
    )


def ours(summary: Mapping[str, Any]) -> InDialect:
    """Of a summary: `sim.metrics.summary`."""
    names = {"ttft": "ttft", "tpot": "per_token", "itl": "gap", "e2e": "e2e"}
    trimmed, requests, goodput = (summary[key] for key in ("trimmed", "requests", "goodput"))
    answered = summary["e2e"]["count"]  # of those that arrived in the measured time
    rates = {
        "duration_s": Rate("measured time (s)", trimmed["end_s"] - trimmed["start_s"]),
        "requests_per_s": Rate("requests/s", _known(summary["throughput"]["requests_per_s"])),
        "output_tokens_per_s": Rate("output tok/s", _known(summary["throughput"]["output_tokens_per_s"])),
    }
    if goodput:
        rates["goodput_per_s"] = Rate("goodput", _known(goodput["requests_per_s"]))
        rates["good_share"] = Rate("SLO met", _known(goodput["share"]))
    return InDialect(
        tool="ours",
        counts={
            "answered": Rate("finished", answered),
            "failed": Rate("others", requests["arrived"] - trimmed["requests_left_out"] - answered),
        },
        latencies={
            key: Latency(
                section.upper(),
                *(
                    _known(summary[section][f"{name}_s"])
                    for name in ("mean", *(f"p{q}" for q in PERCENTILES))
                ),
            )
            for section, key in names.items()
        },
        rates=rates,
    )


def in_dialects(
    names: Iterable[str], requests: pd.DataFrame, times: TokenTimes | None, window: Window, slo: Slo | None
) -> dict[str, dict[str, Any]]:
    """By the name in `DIALECTS`, as `to_json`; requests and their times: of the whole run."""
    served = Served.of(requests, window, times)
    return {name: DIALECTS[name](served, slo).to_json() for name in names}


DIALECTS: Mapping[str, Callable[[Served, Slo | None], InDialect]] = {
    "vllm_bench": vllm_bench,
    "guidellm": guidellm,
    "aiperf": aiperf,
    "mlperf": mlperf,
}
"""Of other tools, by the name that settings give them."""

DIFFERENCES = (
    "Failed requests: ours counts their first tokens and gaps, and all arrivals in the SLO's share; others "
    "count answered ones (AIPerf's good share: all). MLPerf has no result where one fails.",
    "Per token after the first: guidellm calls it ITL and weighs an answer by its tokens; AIPerf calls it "
    "Inter Token Latency, the others TPOT. guidellm's TPOT has the first token in it.",
    "Every gap: ITL of ours and vLLM, of all answers together; AIPerf's Inter Chunk Latency.",
    "Percentiles: guidellm and MLPerf take a value that was measured, the others interpolate.",
    "Rates are over the measured time (ours), the start to the last answer (vLLM), from the first request on "
    "(guidellm, AIPerf: the first that was answered), to the end of the last query (MLPerf, n - 1 queries); "
    "guidellm's tokens/s from the first token to the last.",
    "Answers of one token have no TPOT: ours and vLLM let the SLO's term pass, AIPerf does not, guidellm "
    "leaves them out.",
)
"""Why the tools' figures of one run differ."""


def _known(value: float | None) -> float:
    return float("nan") if value is None else float(value)


def _good(name: str, good: NDArray[np.bool_] | None, duration_s: float) -> dict[str, Rate]:
    return {} if good is None else {"goodput_per_s": Rate(name, _per(good.sum(), duration_s))}


def _last_end_s(served: Served) -> float:
    """Of the answers."""
    return float(served.last_s[served.done].max()) if served.done.any() else served.window.start_s


def _per(part: float, whole: float) -> float:
    return float(part) / whole if whole > 0 else float("nan")
