"""Computes the metrics of a run by the definitions of other benchmark tools, from the time of each token.

Definitions (n: output tokens; first, last: times of these tokens; sent: arrival; q: percentile as a share):

    tool successful request percentiles time base of rates ours        finished            interpolated
    the measured time
    vllm_bench  succeeded           interpolated     start of the benchmark to the last output
    guidellm    successful          measured value   first request sent to the last output
                                    (weighted)
    aiperf      valid               interpolated     first valid request sent to the last output
    mlperf      all, or no result   sorted[n q]      start to the end of the query issued last

    per token   without the first: (last - first) / (n - 1)    with the first: (last - sent) / n
    ours        TPOT, n > 1                                    -
    vllm_bench  TPOT, n > 1                                    -
    guidellm    ITL, weighted by n - 1                         TPOT, weighted by n
    aiperf      ITL, n > 1                                     -
    mlperf      TPOT, n > 1                                    -

    every gap   ours and vllm_bench: ITL over all requests; aiperf: ICL; guidellm, mlperf: not reported

With speculation a pass streams several tokens in one chunk: a burst. A gap is between two chunks, for ours as
for vLLM bench and AIPerf, so ITL is the time between bursts; the times per token divide by all tokens.

Ours counts every first token and every gap in the measured time, including those of unfinished requests; the
other tools count only successful requests. Sources, read in November 2026: vllm/benchmarks/serve.py
(calculate_metrics); guidellm schemas/base/request_stats.py, statistics.py and schemas/benchmark/goodput.py;
aiperf docs/metrics_reference.md and metrics/types; mlcommons/inference loadgen/results.cc and logging.cc
(Server scenario with use_token_latencies).

`MetricsSettings` selects the definitions that a run reports, and its measured part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.metrics.definitions import Window, longest_tokens
from sim.metrics.slo import Slo
from sim.metrics.token_times import TokenTimes
from sim.records.table import AnyTable, column

Values = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """Times of requests as a load generator records them, in seconds; NaN for events that did not occur.

    Arrays have one value per request in the order of arrival, unless noted otherwise.
    """

    window: Window
    sent_s: Values
    first_s: Values
    last_s: Values
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    """Output tokens of all samples of a request; rates count these."""
    longest_tokens: NDArray[np.int64]
    """Output tokens of the longest sample, which ends last; times per token use these."""
    done: NDArray[np.bool_]
    """True for finished requests."""
    token_s: Values
    """Time of each token; empty if the times are unknown."""
    token_row: NDArray[np.int64]
    """Index of the request of each token."""
    gap_s: Values
    """Seconds between two tokens of a request, for each gap; tokens of one chunk have no gap between them."""
    gap_row: NDArray[np.int64]
    """Index of the request of each gap."""

    @classmethod
    def of(cls, requests: AnyTable, window: Window, times: TokenTimes | None) -> Served:
        """Returns the requests that arrived in the window. times: token times of all requests.

        None: gaps are unknown.
        """
        arrival_s = column(requests, "arrival_s", np.float64)
        rows = np.flatnonzero(window.holds(arrival_s))
        rows = rows[np.argsort(arrival_s[rows], kind="stable")]
        table = requests.take(rows)
        if times is None:
            times = TokenTimes(np.empty(0), np.zeros(len(requests), np.int64))
        place = np.full(len(requests), -1)
        place[rows] = np.arange(len(rows))
        token_row = place[np.repeat(np.arange(len(requests)), times.num_tokens)]
        gap_s, gap_row = times.gaps()
        gap_row = place[gap_row]
        return cls(
            window=window,
            sent_s=column(table, "arrival_s", np.float64),
            first_s=column(table, "first_token_s", np.float64),
            last_s=column(table, "last_token_s", np.float64),
            prompt_tokens=column(table, "prompt_tokens", np.int64),
            output_tokens=column(table, "output_tokens", np.int64),
            longest_tokens=longest_tokens(table).astype(np.int64),
            done=(column(table, "status") == "finished"),
            token_s=times.time_s[token_row >= 0],
            token_row=token_row[token_row >= 0],
            gap_s=gap_s[gap_row >= 0],
            gap_row=gap_row[gap_row >= 0],
        )

    @property
    def ttft_s(self) -> Values:
        return self.first_s - self.sent_s

    @property
    def e2e_s(self) -> Values:
        return self.last_s - self.sent_s

    @property
    def per_token_s(self) -> Values:
        """Seconds per output token after the first; NaN for outputs of one token."""
        several = self.longest_tokens > 1
        return np.where(
            several, (self.last_s - self.first_s) / np.where(several, self.longest_tokens - 1, 1), np.nan
        )

    @property
    def gaps_of_done(self) -> Values:
        return self.gap_s[self.done[self.gap_row]]

    def within(self, slo: Slo, *, one_token: bool | None) -> NDArray[np.bool_]:
        """Returns which requests meet the SLO. one_token: whether outputs without a TPOT meet its limit."""
        per_token_s = self.per_token_s
        latencies_s = {"ttft": self.ttft_s, "tpot": per_token_s, "e2e": self.e2e_s}
        held = self.done.copy()
        for term, limit_s in slo.request_limits_s.items():
            kept = latencies_s[term] <= limit_s
            if term == "tpot" and one_token:
                kept = kept | np.isnan(per_token_s)
            held &= kept
        return held


def interpolated(values: Values, weights: Values | None, q: float) -> float:
    """Computes numpy's interpolated percentile of values with equal weights (`weights` is ignored)."""
    return float(np.percentile(values, q))


def measured_value(values: Values, weights: Values | None, q: float) -> float:
    """Computes guidellm's percentile: the smallest value at or below which q % of the weight lies."""
    order = np.argsort(values, kind="stable")
    share = np.cumsum((np.ones(len(values)) if weights is None else weights)[order])
    # The tolerance keeps a cumulative share of exactly q, up to rounding errors, on its value.
    at = int(np.searchsorted(share / share[-1], q / 100 - 1e-12, side="left"))
    return float(values[order][min(at, len(values) - 1)])


def next_value(values: Values, weights: Values | None, q: float) -> float:
    """Computes LoadGen's percentile, sorted[floor(n q / 100)]: p50 of 1, 2, 3, 4 is 3."""
    return float(np.sort(values)[min(int(len(values) * q / 100 + 1e-9), len(values) - 1)])


PERCENTILES = (50, 90, 99)


class Latency(NamedTuple):
    """A latency under the tool's name, with its statistics in seconds; NaN if there are none."""

    name: str
    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float


class Rate(NamedTuple):
    """A metric of a whole run under the tool's name."""

    name: str
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class InDialect:
    """The metrics of a run by the definitions of one tool.

    The keys of the mappings are ours: one key means the same quantity for all tools.
    """

    tool: str
    counts: Mapping[str, Rate]
    """Keys: answered, failed."""
    latencies: Mapping[str, Latency]
    """Keys: ttft, per_token, per_token_with_first, gap, e2e."""
    rates: Mapping[str, Rate]
    """Keys: duration_s, requests_per_s, output_tokens_per_s, goodput_per_s, good_share, valid."""

    def to_json(self) -> dict[str, Any]:
        """Returns the metrics as plain dictionaries; NaN is kept."""
        figures: dict[str, Latency | Rate] = {**self.counts, **self.latencies, **self.rates}
        return {"tool": self.tool, **{key: figure._asdict() for key, figure in figures.items()}}


Percentile = Callable[[Values, "Values | None", float], float]


def latency(name: str, values: Values, percentile: Percentile, weights: Values | None = None) -> Latency:
    """Computes the mean and the percentiles of the values, ignoring NaN.

    weights: one per value.
    """
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
    """Computes the metrics of `vllm bench serve`."""
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
    """Computes the metrics of guidellm.

    If the SLO has a TPOT limit, its goodput excludes outputs of one token, which have no TPOT.
    """
    done, tokens = served.done, served.longest_tokens.astype(np.float64)
    start_s = float(served.sent_s.min()) if len(served.sent_s) else served.window.start_s
    duration_s = _last_end_s(served) - start_s
    several = tokens > 1
    # guidellm assumes evenly spaced tokens in an output; its rate covers the time spanned by all outputs.
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
    """Computes the metrics of NVIDIA AIPerf.

    If the SLO has a TPOT limit, an output of one token does not meet it, because it has no TPOT.
    """
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
    """Computes the metrics of the Server scenario of MLPerf LoadGen.

    A run is valid if p99 of TTFT and p99 of TPOT are within their limits. LoadGen waits for every query, so
    it has no metrics for failed ones. It counts n - 1 queries in the rate of n queries.
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
    """Returns the metrics by our own definitions, from a summary (`sim.metrics.summary`)."""
    names = {"ttft": "ttft", "tpot": "per_token", "itl": "gap", "e2e": "e2e"}
    trimmed, requests, goodput = (summary[key] for key in ("trimmed", "requests", "goodput"))
    answered = summary["e2e"]["count"]  # requests that arrived in the measured time and finished
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
    names: Iterable[str], requests: AnyTable, times: TokenTimes | None, window: Window, slo: Slo | None
) -> dict[str, dict[str, Any]]:
    """Returns the metrics per tool, each as from `InDialect.to_json`. names: keys of `DIALECTS`.

    requests, times: of the whole run; without times there are no gaps.
    """
    served = Served.of(requests, window, times)
    return {name: DIALECTS[name](served, slo).to_json() for name in names}


DIALECTS: Mapping[str, Callable[[Served, Slo | None], InDialect]] = {
    "vllm_bench": vllm_bench,
    "guidellm": guidellm,
    "aiperf": aiperf,
    "mlperf": mlperf,
}
"""The other tools, by their names in the settings."""

DIFFERENCES = (
    "Failed requests: ours counts their first tokens and gaps, and counts them in SLO attainment; the other "
    "tools count successful requests only (AIPerf's GoodRequestFraction: all). MLPerf gives no result if a "
    "request fails.",
    "Time per token after the first: guidellm calls it ITL and weights each output by its tokens; AIPerf "
    "calls it Inter Token Latency, the others TPOT. guidellm's TPOT includes the first token.",
    "Gaps between tokens: ours and vLLM call them ITL, over all requests; AIPerf calls them Inter Chunk "
    "Latency. With speculation they are the gaps between bursts of tokens.",
    "Percentiles: guidellm and MLPerf report a measured value, the others interpolate between two.",
    "Rates: ours are per second of the measured time; vLLM's of the time from the start to the last output; "
    "guidellm's and AIPerf's of the time from the first request (AIPerf: the first successful request) to "
    "the last output; MLPerf's of the time to the end of the last query, for n - 1 queries. guidellm's "
    "tokens/s are per second from the first token to the last.",
    "Outputs of one token have no TPOT: with a TPOT limit in the SLO, ours and vLLM count them as good, "
    "AIPerf does not, guidellm leaves them out.",
)
"""Reasons why the tools' metrics differ for one run."""


def _known(value: float | None) -> float:
    return float("nan") if value is None else float(value)


def _good(name: str, good: NDArray[np.bool_] | None, duration_s: float) -> dict[str, Rate]:
    return {} if good is None else {"goodput_per_s": Rate(name, _per(good.sum(), duration_s))}


def _last_end_s(served: Served) -> float:
    """Returns the time of the last token of all successful requests, or the window's start if none."""
    return float(served.last_s[served.done].max()) if served.done.any() else served.window.start_s


def _per(part: float, whole: float) -> float:
    return float(part) / whole if whole > 0 else float("nan")


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsSettings:
    """Settings of the measurement: the measured part of the run, and other definitions of its metrics."""

    warmup_s: float | Literal["auto"] = 0.0
    """Simulated seconds at the start that are excluded from the measurement; auto: determined by MSER-5, see
    `sim.metrics.steady`.
    """
    cooldown_s: float = 0.0
    """Simulated seconds at the end that are not measured."""
    dialect: Literal["ours", "vllm_bench", "guidellm", "aiperf", "mlperf", "all"] = "ours"
    """Also reports the metrics by the definitions of this tool: see `DIALECTS`."""
    percentiles: Literal["estimated", "exact"] = "estimated"
    """Percentiles of a run that streams its tables: estimated during the run, or, for all latencies except
    ITL, computed from the table of requests at its end. Percentiles of other runs are always exact.
    """

    own: tuple[str, ...] = ()
    """Metrics of your own: dotted paths of subclasses of `sim.metrics.figure.Figure`."""

    def __post_init__(self) -> None:
        for name in ("warmup_s", "cooldown_s"):
            value = getattr(self, name)
            if value != "auto" and not 0 <= value < inf:
                or_auto = ", or auto" if name == "warmup_s" else ""
                raise ValueError(f"{name}={value}: must be a finite number >= 0 s{or_auto}")

    @property
    def dialects(self) -> tuple[str, ...]:
        """Names of the other tools whose definitions are reported."""
        return (
            tuple(DIALECTS) if self.dialect == "all" else (self.dialect,) if self.dialect in DIALECTS else ()
        )

    @property
    def known_warmup_s(self) -> float:
        """Warm-up in seconds, for runs that cannot determine it. Raises ValueError for auto."""
        if self.warmup_s == "auto":
            raise ValueError(
                "warmup_s=auto: works in simulated runs only; here it must be a number of seconds"
            )
        return float(self.warmup_s)
