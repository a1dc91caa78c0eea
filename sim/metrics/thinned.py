"""Computes the figures of a whole fleet from one in n of its replicas and requests, with intervals.

A replica of the thinned fleet is a cluster of requests. With y_i the sum of a latency over the requests of
replica i = 1..k, and m_i their number, the mean is the ratio r = sum y_i / sum m_i, and

    h = t(k - 1, 0.975) sqrt(k / (k - 1) sum (y_i - r m_i)^2) / sum m_i

(Cochran, Sampling techniques, 3rd edition, 6.3 and 9A.1, without the correction for a finite population). For
a percentile q, y_i counts the values up to it, and the interval goes from the quantile q - h to the quantile
q + h (Woodruff, Confidence intervals for medians and other position measures, JASA 47, 1952).

Replicas of one fleet share its load, and differ less from each other than two fleets do. The interval from
batches of time (`sim.metrics.one_run`) sees that; it is widened by sqrt(1 + 1 / n), because the whole fleet's
figure varies, too. The wider of both bounds is taken on each side, and at least `LEAST_WIDTH`: a smaller
fleet balances its load a little differently, which neither of the two intervals sees.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.metrics.definitions import PERCENTILES
from sim.metrics.measured import Measured
from sim.metrics.one_run import intervals, output_tokens
from sim.metrics.paired import CONFIDENCE
from sim.metrics.quantiles import student_t
from sim.records.run import RunRecords

LATENCIES = ("ttft", "tpot", "e2e")
LEAST_WIDTH = 0.02
"""Least half width of an interval, as a share of the figure; of a share from 0 to 1, in itself."""


Floats = NDArray[np.float64]


class Estimate(NamedTuple):
    """A figure of the whole fleet and the bounds of its interval; NaN: unknown."""

    value: float
    low: float
    high: float

    def joined(self, low: float, high: float) -> Estimate:
        """Returns the figure with the wider of its bounds and the given ones; an unknown bound stays so."""
        return Estimate(self.value, float(np.minimum(self.low, low)), float(np.maximum(self.high, high)))

    def times(self, factor: float) -> dict[str, float]:
        """Returns the figure and its bounds, multiplied by a factor, for the summary."""
        return {name: value * factor for name, value in self._asdict().items()}


class Clusters:
    """The requests of a thinned fleet by their replica. replica: index of each, with shape [N]."""

    def __init__(self, replica: NDArray[np.int64], num_replicas: int) -> None:
        self._replica = replica
        self._num_replicas = num_replicas

    def mean(self, values: Floats) -> Estimate:
        """Computes the mean of the values [N] that are not NaN, and its interval."""
        known = ~np.isnan(values)
        count = int(known.sum())
        if not count:
            return Estimate(math.nan, math.nan, math.nan)
        sums, counts = self._totals(np.where(known, values, 0.0)), self._totals(known)
        mean = float(sums.sum() / count)
        half_width = self._half_width(sums - mean * counts) / count
        return Estimate(mean, mean - half_width, mean + half_width)

    def percentile(self, values: Floats, q: float) -> Estimate:
        """Computes the percentile q of the values [N] that are not NaN; a bound is NaN if it lies beyond."""
        known = values[~np.isnan(values)]
        if not len(known):
            return Estimate(math.nan, math.nan, math.nan)
        value = float(np.percentile(known, q))
        share = self.mean(np.where(np.isnan(values), np.nan, values <= value))
        half_width = share.high - share.value
        ends = np.array([q - 100 * half_width, q + 100 * half_width])
        low, high = (
            float(np.percentile(known, end)) if 0 <= end <= 100 else math.nan for end in ends.tolist()
        )
        return Estimate(value, low, high)

    def total(self, amounts: Floats) -> Estimate:
        """Computes the sum of the amounts [N], and its interval."""
        sums = self._totals(amounts)
        half_width = self._half_width(sums - sums.mean())
        total = float(sums.sum())
        return Estimate(total, total - half_width, total + half_width)

    def _totals(self, amounts: NDArray[Any]) -> Floats:
        """Returns the sum of the amounts [N] of each replica."""
        is_served = self._replica >= 0
        totals = np.bincount(self._replica[is_served], amounts[is_served], self._num_replicas)
        return totals.astype(np.float64, copy=False)

    def _half_width(self, deviations: Floats) -> float:
        """Returns half the width of the interval of a sum over replicas, from their deviations."""
        k = len(deviations)
        if k < 2:
            return math.nan
        error = math.sqrt(k / (k - 1) * float((deviations**2).sum()))
        return student_t(k - 1, (1 + CONFIDENCE) / 2) * error


def thinned_figures(records: RunRecords, part: Measured, keeps_one_in: int) -> dict[str, Any]:
    """Computes the section `thinned` of the summary; rates are those of the whole fleet.

    Maxima, peaks and counts in the other sections are those of the simulated part.
    """
    requests, window = part.requests, part.window
    by_time = intervals(records, part.table, requests, window)
    widened = math.sqrt(1 + 1 / keeps_one_in)
    clusters = Clusters(requests["replica"].to_numpy(np.int64), records.num_replicas)
    found: dict[str, dict[str, Estimate]] = {}
    for name in LATENCIES:
        values = requests[f"{name}_s"].to_numpy(np.float64)
        found[name] = {"mean_s": clusters.mean(values)}
        found[name] |= {f"p{q}_s": clusters.percentile(values, q) for q in PERCENTILES}
    if "slo_met" in requests:
        found["goodput"] = {"share": clusters.mean(requests["slo_met"].to_numpy(np.float64))}
    found["throughput"] = _throughput(records, part) if window.duration_s > 0 else {}
    figures: dict[str, Any] = {}
    for section, estimates in found.items():
        factor = keeps_one_in if section == "throughput" else 1
        figures[section] = {}
        for key, one in estimates.items():
            least = LEAST_WIDTH if key == "share" else LEAST_WIDTH * one.value
            wide = _widest(one.joined(one.value - least, one.value + least), by_time[section][key], widened)
            figures[section][key] = wide.times(factor)
    return {
        "keeps_one_in": keeps_one_in,
        "replicas": records.num_replicas,
        "of_replicas": records.num_replicas * keeps_one_in,
        "confidence": CONFIDENCE,
        **figures,
    }


def _throughput(records: RunRecords, part: Measured) -> dict[str, Estimate]:
    """Computes the rates of the thinned fleet.

    The relative error of output tokens is that of the tokens of the requests that finished.
    """
    table, window = part.table, part.window
    clusters = Clusters(table["replica"].to_numpy(np.int64), records.num_replicas)
    is_finished = window.holds(table["finished_s"].to_numpy(np.float64))
    is_finished &= (table["status"] == "finished").to_numpy(np.bool_)
    per_s = 1 / window.duration_s
    time_s, weights = output_tokens(records, table)
    emitted = float(weights[window.holds(time_s)].sum()) * per_s
    of_finished = clusters.total(np.where(is_finished, table["output_tokens"].to_numpy(np.float64), 0.0))
    half_width = emitted * (of_finished.high / of_finished.value - 1) if of_finished.value else math.nan
    return {
        "requests_per_s": clusters.total(np.where(is_finished, per_s, 0.0)),
        "output_tokens_per_s": Estimate(emitted, emitted - half_width, emitted + half_width),
    }


def _widest(estimate: Estimate, by_time: Mapping[str, Any], widened: float) -> Estimate:
    """Returns the wider bounds of an estimate and of the interval from batches of time, if there is one."""
    if by_time["lack"] is not None:
        return estimate
    value = estimate.value
    low, high = (value + (by_time[side] - value) * widened for side in ("low", "high"))
    return estimate.joined(low, high)
