"""Computes the metrics of a whole fleet from one in n of its replicas and requests, with intervals.

A replica of the thinned fleet is a cluster of requests. With y_i the sum of a latency over the requests of
replica i = 1..k, and m_i their number, the mean is the ratio r = sum y_i / sum m_i, and

    h = t(k - 1, 0.975) sqrt(k / (k - 1) sum (y_i - r m_i)^2) / sum m_i

(Cochran, Sampling techniques, 3rd edition, 6.3 and 9A.1, without the correction for a finite population). For
a percentile q, y_i counts the values up to it, and the interval goes from the quantile q - h to the quantile
q + h (Woodruff, Confidence intervals for medians and other position measures, JASA 47, 1952).

Replicas of one fleet share its load, and differ less from each other than two fleets do. The interval from
batches of time (`sim.metrics.steady`) covers that; it is widened by sqrt(1 + 1 / n), because the whole
fleet's metric varies as well. The wider of both bounds is used on each side, and at least `LEAST_WIDTH`: a
smaller fleet balances its load slightly differently, which neither interval covers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sim.metrics.confidence import CONFIDENCE, student_t
from sim.metrics.definitions import PERCENTILES, Window, times
from sim.metrics.distributions import Kept
from sim.records.table import AnyTable, column

LATENCIES = ("ttft", "tpot", "e2e")
LEAST_WIDTH = 0.02
"""Minimum half width of an interval, relative to the metric; absolute for shares from 0 to 1."""
MET, FINISHED, TOKENS = "met", "finished", "finished_tokens"
"""Counts by replica, in addition to the latencies: measured requests that met the SLO, requests that finished
in the measured time, and output tokens of the latter.
"""

Floats = NDArray[np.float64]


class ByReplica:
    """The measured requests of a thinned fleet, by replica: arrays have one value per replica, [R].

    num_replicas: of the thinned fleet.
    """

    def __init__(self, kept: Kept, num_replicas: int) -> None:
        self._kept = kept
        self.latencies = {name: [kept.values() for _ in range(num_replicas)] for name in LATENCIES}
        self.totals = [kept.totals() for _ in range(num_replicas)]
        self.has_sessions = False

    def add(self, table: AnyTable, window: Window) -> None:
        """Adds requests: rows of `request_metrics`. window: from the end of the warm-up on."""
        self.has_sessions = self.has_sessions or bool((column(table, "session_id") >= 0).any())
        replica = column(table, "replica", np.int64)
        order = np.argsort(replica, kind="stable")
        ends = np.searchsorted(replica[order], np.arange(len(self.totals) + 1))
        measured = window.holds(times(table, "arrival_s"))
        finished = window.holds(times(table, "finished_s"))
        finished &= column(table, "status") == "finished"
        tokens = column(table, "output_tokens")
        met = column(table, "slo_met", np.bool_) if "slo_met" in table else np.zeros(len(table), np.bool_)
        latencies = {name: times(table, f"{name}_s") for name in LATENCIES}
        for index, totals in enumerate(self.totals):
            rows = order[ends[index] : ends[index + 1]]
            if not len(rows):
                continue
            own, ended = rows[measured[rows]], rows[finished[rows]]
            totals.add("measured", measured[rows])
            totals.add(MET, met[own])
            totals.add(FINISHED, finished[rows])
            totals.add(TOKENS, tokens[ended])
            for name, values in latencies.items():
                self.latencies[name][index].add(values[own])

    def merge(self, other: ByReplica) -> None:
        """Adds the requests of other, which is not changed."""
        self.has_sessions = self.has_sessions or other.has_sessions
        for mine, theirs in zip(self.totals, other.totals, strict=True):
            mine.merge(theirs)
        for name, every in self.latencies.items():
            for mine_of, theirs_of in zip(every, other.latencies[name], strict=True):
                mine_of.merge(theirs_of)

    def sums(self, name: str) -> tuple[Floats, Floats]:
        """Returns the sum and the number of the values of a latency, or of `MET`, `FINISHED`, `TOKENS`."""
        if name in LATENCIES:
            every = self.latencies[name]
            counts = np.array([one.count for one in every], np.float64)
            return np.array([one.total for one in every], np.float64), counts
        counted = "measured" if name == MET else FINISHED
        found = ([float(totals[key]) for totals in self.totals] for key in (name, counted))
        amounts, counts = map(np.array, found)
        return amounts, counts

    def upto(self, name: str, value: float) -> Floats:
        """Returns the number of the values of a latency that are at most `value`."""
        return np.array([one.count_upto(value) for one in self.latencies[name]], np.float64)

    def percentiles(self, name: str, q: Sequence[float]) -> Floats:
        """Returns the percentiles q (0 to 100) of a latency over all replicas."""
        whole = self._kept.values()
        for one in self.latencies[name]:
            whole.merge(one)
        return whole.percentiles(q)


class Thinned(Protocol):
    """The workload of a thinned fleet."""

    def of_the_whole(
        self, summary: Mapping[str, Any], by_replica: ByReplica, *, num_replicas: int, has_sessions: bool
    ) -> dict[str, Any]:
        """Returns the section `thinned` of the summary."""
        ...


class Estimate(NamedTuple):
    """A metric of the whole fleet and the bounds of its interval; NaN: unknown."""

    value: float
    low: float
    high: float

    @classmethod
    def around(cls, value: float, half_width: float) -> Estimate:
        """Returns a metric with symmetric bounds."""
        return cls(value, value - half_width, value + half_width)

    def joined(self, low: float, high: float) -> Estimate:
        """Returns the metric with the wider of its own and the given bounds; unknown bounds stay unknown."""
        return Estimate(self.value, float(np.minimum(self.low, low)), float(np.maximum(self.high, high)))

    def within(self, highest: float) -> Estimate:
        """Returns the metric with bounds clamped to [0, `highest`]; unknown bounds stay unknown."""
        return Estimate(self.value, float(np.maximum(self.low, 0.0)), float(np.minimum(self.high, highest)))

    def times(self, factor: float) -> dict[str, float]:
        """Returns the metric and its bounds, multiplied by a factor, for the summary."""
        return {name: value * factor for name, value in self._asdict().items()}


def ratio(sums: Floats, counts: Floats) -> Estimate:
    """Computes the mean of values from their sums and numbers by replica, and its interval."""
    count = float(counts.sum())
    if not count:
        return Estimate(math.nan, math.nan, math.nan)
    mean = float(sums.sum()) / count
    return Estimate.around(mean, half_width(sums - mean * counts) / count)


def half_width(deviations: Floats) -> float:
    """Computes half the width of the interval of a sum over replicas, from their deviations."""
    k = len(deviations)
    if k < 2:
        return math.nan
    error = math.sqrt(k / (k - 1) * float((deviations**2).sum()))
    return student_t(k - 1, (1 + CONFIDENCE) / 2) * error


def thinned_figures(
    summary: Mapping[str, Any], by: ByReplica, *, num_replicas: int, keeps_one_in: int
) -> dict[str, Any]:
    """Computes the section `thinned` of the summary; rates are for the whole fleet.

    summary: the metrics of the simulated part, with its `intervals` from batches of time. Its maxima, peaks
    and counts cover only this part.
    """
    widened = math.sqrt(1 + 1 / keeps_one_in)
    found: dict[str, dict[str, Estimate]] = {name: _latency(by, name) for name in LATENCIES}
    if summary["goodput"] is not None:
        found["goodput"] = {"share": ratio(*by.sums(MET))}
    if summary["throughput"]["requests_per_s"] is not None:
        found["throughput"] = {
            f"{key}_per_s": _rate(summary["throughput"][f"{key}_per_s"], by.sums(name)[0])
            for key, name in (("requests", FINISHED), ("output_tokens", TOKENS))
        }
    figures: dict[str, Any] = {}
    for section, estimates in found.items():
        factor = keeps_one_in if section == "throughput" else 1
        figures[section] = {}
        for key, one in estimates.items():
            least = LEAST_WIDTH if key == "share" else LEAST_WIDTH * one.value
            wide = one.joined(one.value - least, one.value + least)
            wide = _widest(wide, summary["intervals"][section][key], widened)
            figures[section][key] = wide.within(1.0 if key == "share" else math.inf).times(factor)
    return {
        "keeps_one_in": keeps_one_in,
        "replicas": num_replicas,
        "of_replicas": num_replicas * keeps_one_in,
        "confidence": CONFIDENCE,
        **figures,
    }


def _latency(by: ByReplica, name: str) -> dict[str, Estimate]:
    """Computes the mean and the percentiles of a latency; a bound beyond all values is NaN."""
    sums, counts = by.sums(name)
    found = {"mean_s": ratio(sums, counts)}
    for q, value in zip(PERCENTILES, by.percentiles(name, PERCENTILES).tolist(), strict=True):
        share = ratio(by.upto(name, value), counts)
        wide = 100 * (share.high - share.value)
        low, high = (
            float(by.percentiles(name, (end,))[0]) if 0 <= end <= 100 else math.nan
            for end in (q - wide, q + wide)
        )
        found[f"p{q}_s"] = Estimate(value, low, high)
    return found


def _rate(value: float, amounts: Floats) -> Estimate:
    """Returns a rate of the simulated part with the relative error of the amounts of its replicas."""
    total = float(amounts.sum())
    return Estimate.around(value, value * half_width(amounts - amounts.mean()) / total if total else math.nan)


def _widest(estimate: Estimate, by_time: Mapping[str, Any], widened: float) -> Estimate:
    """Returns the wider bounds of an estimate and of the interval from batches of time, if there is one."""
    if by_time["lack"] is not None:
        return estimate
    value = estimate.value
    low, high = (value + (by_time[side] - value) * widened for side in ("low", "high"))
    return estimate.joined(low, high)
