"""Computes highest rates, curves and limiting SLO terms from the runs of all arms and seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from experiments.goodput.search import FIGURES, Arm, Found, Measured
from sim.metrics.confidence import Interval, Paired, compare_paired, mean_interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Highest:
    """Highest rate at which an arm meets the SLO, over the seeds."""

    arm: Arm
    rate: Interval
    """Highest rate, in requests/s; a seed that meets the SLO at no rate counts as 0."""
    goodput_per_s: Interval
    figures: Mapping[str, Interval]
    """Figures at that rate."""
    limiting: str | None
    """SLO term that most requests miss just above; "overload"; None if no rate misses the SLO."""
    share_above: Interval
    """SLO attainment at the lowest rate that misses the SLO."""
    best: Paired | None
    """Rate compared with that of the best arm; None for the best arm itself."""

    lack: str | None
    """Why a seed does not show the steady state of a higher rate; None if each seed misses the SLO there."""

    @property
    def is_open(self) -> bool:
        """True if no higher rate is known to miss the SLO, so that `rate` is a lower bound."""
        return self.lack is not None

    @property
    def sessions_per_s(self) -> Interval:
        """Highest rate in sessions/s; NaN for requests that arrive one by one."""
        each = self.arm.requests_per_session or math.nan
        mean, low, high, count = self.rate
        return Interval(mean / each, low / each, high / each, count)

    @property
    def rate_per_device(self) -> float:
        """Highest rate per GPU, in requests/s."""
        return self.rate.mean / self.arm.num_devices


def highest_of(arms: Sequence[Arm], found: Mapping[str, Sequence[Found]]) -> list[Highest]:
    """Returns the highest rates, best arm first; found: arm -> results in the order of the seeds."""
    rates = {arm.name: [_rate(one) for one in found[arm.name]] for arm in arms}
    order = sorted(arms, key=lambda arm: -mean_interval(rates[arm.name]).mean)
    best = order[0]
    intervals = {arm.name: _rate_interval(arm, found[arm.name]) for arm in arms}
    return [
        Highest(
            arm=arm,
            rate=intervals[arm.name],
            goodput_per_s=mean_interval(
                [one.highest.goodput_per_s if one.highest else 0.0 for one in found[arm.name]]
            ),
            figures={key: _figure_interval(found[arm.name], key) for key in FIGURES},
            limiting=_limiting(found[arm.name]),
            share_above=mean_interval(
                [one.above.share if one.above else math.nan for one in found[arm.name]]
            ),
            lack=_lack(found[arm.name]),
            best=None if arm is best else _compared(arm, best, found, intervals),
        )
        for arm in order
    ]


def runs_table(
    arms: Sequence[Arm], seeds: Sequence[int], found: Mapping[str, Sequence[Found]]
) -> pd.DataFrame:
    """Returns one row per run: arm, seed, the part of the search, rate, share, and its figures."""
    rows: list[dict[str, Any]] = []
    for arm in arms:
        for seed, one in zip(seeds, found[arm.name], strict=False):
            runs = [("curve", run) for run in one.at_rates]
            runs += [("scale", one.at_scale_rate)] if one.at_scale_rate else []
            runs += [("highest", one.highest)] if one.highest else []
            runs += [("above", one.above)] if one.above else []
            rows += [{"arm": arm.name, "seed": seed, "part": part, **_row(run)} for part, run in runs]
    return pd.DataFrame(rows)


def curve(found: Sequence[Found]) -> list[tuple[float, Interval, bool]]:
    """Returns (rate, share within the SLO, whether a seed was overloaded), by rate."""
    return [
        (rate, mean_interval([run.share for run in runs]), any(run.is_overloaded for run in runs))
        for rate, runs in _by_rate(found)
    ]


def goodput_curve(found: Sequence[Found]) -> list[tuple[float, Interval]]:
    """Returns (rate, requests/s within the SLO), by rate, without rates at which a seed was overloaded."""
    return [
        (rate, mean_interval([run.goodput_per_s for run in runs]))
        for rate, runs in _by_rate(found)
        if not any(run.is_overloaded for run in runs)
    ]


def _by_rate(found: Sequence[Found]) -> list[tuple[float, list[Measured]]]:
    """Returns the runs of the curves of all seeds by their rate."""
    by_rate: dict[float, list[Measured]] = {}
    for one in found:
        for run in one.at_rates:
            by_rate.setdefault(run.rate, []).append(run)
    return sorted(by_rate.items())


def scale_curve(found: Sequence[Found], scales: Sequence[float]) -> list[tuple[float, Interval]]:
    """Returns (multiple of the SLO's limits, share of requests within them) at the scale rate."""
    runs = [one.at_scale_rate for one in found if one.at_scale_rate is not None]
    return [
        (scale, mean_interval([run.scale_shares[scale] for run in runs])) for scale in sorted(scales) if runs
    ]


def _rate(found: Found) -> float:
    return found.highest.rate if found.highest else 0.0


def _rate_interval(arm: Arm, found: Sequence[Found]) -> Interval:
    """Returns the mean of the highest rates; its interval contains the steps of the search, too.

    The upper bound is that of the lowest rates which miss the SLO.
    """
    if arm.is_trace and len(found) == 1:
        return _of_trace(found[0], arm.target)
    met = mean_interval([_rate(one) for one in found])
    missed = mean_interval([_missed(one) for one in found])
    return met if math.isnan(missed.high) else met._replace(high=max(met.high, missed.high))


def _of_trace(found: Found, target: float) -> Interval:
    """Returns the highest rate of a trace, from the highest rate surely within the SLO to the first beyond.

    A run is surely within it if the whole interval of its SLO attainment is at least the target, and surely
    beyond it if the whole interval is below, or if its backlog grows. There are no bounds if no run is surely
    within the SLO, or none surely beyond it.
    """
    rate, missed = _rate(found), _missed(found)
    none = Interval(rate, math.nan, math.nan, 1)
    runs = [run for run in (*found.at_rates, found.highest, found.above) if run is not None]
    shares = {run.rate: run.intervals.get("goodput.share", none) for run in runs}
    beyond = [
        run.rate
        for run in runs
        if not run.is_attained and (shares[run.rate].high < target or run.is_overloaded or run.lack)
    ]
    high = min(beyond, default=math.nan)
    within = [each for each, share in shares.items() if share.low >= target and not each >= high]
    if not within or math.isnan(high) or math.isnan(missed):
        return none
    count = min(share.num_values for share in shares.values() if not math.isnan(share.low))
    return Interval(rate, min(max(within), rate), max(high, missed), count)


def _compared(
    arm: Arm, best: Arm, found: Mapping[str, Sequence[Found]], intervals: Mapping[str, Interval]
) -> Paired:
    """Compares the highest rates of an arm and of the best one; the interval contains the search's steps.

    The interval of the ratio of two rates of a trace takes them as independent, so it is rather too wide.
    """
    ours, theirs = found[arm.name], found[best.name]
    paired = compare_paired([_rate(one) for one in ours], [_rate(one) for one in theirs])
    if paired.ratio is None or paired.same:
        return paired
    if arm.is_trace:
        one, other = intervals[arm.name], intervals[best.name]
        if math.isnan(one.low) or math.isnan(other.low) or one.low <= 0:
            return paired
        down = math.hypot(math.log(one.mean / one.low), math.log(other.high / other.mean))
        up = math.hypot(math.log(one.high / one.mean), math.log(other.mean / other.low))
        count = min(one.num_values, other.num_values)
        bounds = paired.ratio.mean * math.exp(-down), paired.ratio.mean * math.exp(up)
        return replace(paired, num_pairs=count, ratio=Interval(paired.ratio.mean, *bounds, count))
    least = compare_paired([_rate(one) for one in ours], [_missed(one) for one in theirs]).ratio
    most = compare_paired([_missed(one) for one in ours], [_rate(one) for one in theirs]).ratio
    if least is None or most is None or math.isnan(paired.ratio.low):
        return paired
    low, high = min(paired.ratio.low, least.low), max(paired.ratio.high, most.high)
    return replace(paired, ratio=paired.ratio._replace(low=low, high=high))


def _missed(found: Found) -> float:
    return math.nan if found.above is None else found.above.rate


def _lack(found: Sequence[Found]) -> str | None:
    """Returns why at least one seed does not show what happens at higher rates; None if all of them do."""
    for one in found:
        if one.above is None:
            return "no tried rate misses the SLO"
        if one.above.lack is not None and not one.above.is_overloaded and one.above.is_attained:
            return one.above.lack.reason
    return None


def _figure_interval(found: Sequence[Found], key: str) -> Interval:
    if len(found) == 1 and found[0].highest is not None and key in found[0].highest.intervals:
        return found[0].highest.intervals[key]
    return mean_interval([_figure(one.highest, key) for one in found])


def _figure(run: Measured | None, key: str) -> float:
    value = None if run is None else run.figures[key]
    return math.nan if value is None else value


def _limiting(found: Sequence[Found]) -> str | None:
    above = [one.above for one in found if one.above is not None]
    if not above:
        return None
    if sum(run.is_overloaded for run in above) * 2 > len(above):
        return "overload"
    terms = above[0].term_shares
    return min(terms, key=lambda term: sum(run.term_shares[term] for run in above))


def _row(run: Measured) -> dict[str, Any]:
    share = run.intervals.get("goodput.share")
    return {
        "rate": run.rate,
        "share": run.share,
        **({"share_low": share.low, "share_high": share.high} if share is not None else {}),
        "goodput_per_s": run.goodput_per_s,
        "overloaded": run.is_overloaded,
        "requests": run.num_requests,
        "lasts_s": run.lasts_s,
        "lack": "" if run.lack is None else run.lack.reason,
        **{f"{term}_share": share for term, share in run.term_shares.items()},
        **{key: math.nan if value is None else value for key, value in run.figures.items()},
    }
