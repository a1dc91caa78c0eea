"""Computes highest rates, curves and limiting SLO terms from the runs of all arms and seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from experiments.goodput.search import FIGURES, Arm, Found, Measured
from sim.metrics.paired import Interval, Paired, compare_paired, mean_interval


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
    return [
        Highest(
            arm=arm,
            rate=_rate_interval(found[arm.name]),
            goodput_per_s=mean_interval(
                [one.highest.goodput_per_s if one.highest else 0.0 for one in found[arm.name]]
            ),
            figures={
                key: mean_interval([_figure(one.highest, key) for one in found[arm.name]]) for key in FIGURES
            },
            limiting=_limiting(found[arm.name]),
            share_above=mean_interval(
                [one.above.share if one.above else math.nan for one in found[arm.name]]
            ),
            lack=_lack(found[arm.name]),
            best=None if arm is best else compare_paired(rates[arm.name], rates[best.name]),
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
    by_rate: dict[float, list[Measured]] = {}
    for one in found:
        for run in one.at_rates:
            by_rate.setdefault(run.rate, []).append(run)
    return [
        (rate, mean_interval([run.share for run in runs]), any(run.is_overloaded for run in runs))
        for rate, runs in sorted(by_rate.items())
    ]


def goodput_curve(found: Sequence[Found]) -> list[tuple[float, Interval]]:
    """Returns (rate, requests/s within the SLO), by rate, without rates at which a seed was overloaded."""
    by_rate: dict[float, list[Measured]] = {}
    for one in found:
        for run in one.at_rates:
            by_rate.setdefault(run.rate, []).append(run)
    return [
        (rate, mean_interval([run.goodput_per_s for run in runs]))
        for rate, runs in sorted(by_rate.items())
        if not any(run.is_overloaded for run in runs)
    ]


def scale_curve(found: Sequence[Found], scales: Sequence[float]) -> list[tuple[float, Interval]]:
    """Returns (multiple of the SLO's limits, share of requests within them) at the scale rate."""
    runs = [one.at_scale_rate for one in found if one.at_scale_rate is not None]
    return [
        (scale, mean_interval([run.scale_shares[scale] for run in runs])) for scale in sorted(scales) if runs
    ]


def _rate(found: Found) -> float:
    return found.highest.rate if found.highest else 0.0


def _rate_interval(found: Sequence[Found]) -> Interval:
    """Returns the mean of the highest rates; its interval contains the steps of the search, too.

    The upper bound is that of the lowest rates which miss the SLO.
    """
    met = mean_interval([_rate(one) for one in found])
    missed = mean_interval([one.above.rate if one.above else math.nan for one in found])
    return met if math.isnan(missed.high) else met._replace(high=max(met.high, missed.high))


def _lack(found: Sequence[Found]) -> str | None:
    """Returns why at least one seed does not show what happens at higher rates; None if all of them do."""
    for one in found:
        if one.above is None:
            return "no tried rate misses the SLO"
        if one.above.lack is not None and not one.above.is_overloaded and one.above.is_attained:
            return one.above.lack.reason
    return None


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
    return {
        "rate": run.rate,
        "share": run.share,
        "goodput_per_s": run.goodput_per_s,
        "overloaded": run.is_overloaded,
        "requests": run.num_requests,
        "lasts_s": run.lasts_s,
        "lack": "" if run.lack is None else run.lack.reason,
        **{f"{term}_share": share for term, share in run.term_shares.items()},
        **{key: math.nan if value is None else value for key, value in run.figures.items()},
    }
