"""Searches the highest rate at which one arm meets the SLO with one seed, and measures it at given rates.

Every run of a seed has the same requests, only with shorter gaps (common random numbers). The share within
the SLO therefore falls with the rate with little noise, and bisection finds where it crosses the target. A
run that becomes overloaded is ended early, and counts as a miss. A run counts as a hit only if it shows a
steady state (`experiments.study.steady_state`): its traffic is made longer until it does, or until it has as
many requests as allowed. The rate of sessions is that of their requests: sessions/s times requests of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, inf
from types import MappingProxyType
from typing import Any, NamedTuple

import pandas as pd

from experiments.study.bisection import FACTOR, Bracket, bisected, bracketed
from experiments.study.longer_traffic import last_begin_s, longer_traffic
from experiments.study.steady_state import Lack, lack_of, needed_s, steady_part, steady_run, stepped
from experiments.study.trace_runs import TraceRun, trace_interval
from sim.metrics.confidence import Interval
from sim.metrics.result import RunResult
from sim.metrics.slo import Slo
from sim.records.table import to_pandas
from sim.settings.errors import ConfigError
from sim.settings.scenario import run
from sim.setup.scenario import Scenario
from sim.workload.base import Source
from sim.workload.modified import faster


class Measured(NamedTuple):
    """Figures of one run."""

    rate: float  # arrivals, in requests/s
    share: float  # share of the requests within the SLO
    is_overloaded: bool
    term_shares: Mapping[str, float]  # SLO term -> share of the requests within its limit
    scale_shares: Mapping[float, float]  # multiple of the SLO's limits -> share of the requests within them
    figures: Mapping[str, float | None]  # dotted key of summary.json -> value
    notes: Sequence[str]
    num_requests: int
    lasts_s: float  # until the last request, or session, began
    least_s: float  # the same in the shortest run that could show a steady state
    lack: Lack | None  # why the run does not show a steady state; None if it does
    is_attained: bool  # whether the share attains the target
    intervals: Mapping[str, Interval] = MappingProxyType({})  # of a trace: of goodput.share and latencies

    @property
    def goodput_per_s(self) -> float:
        """Goodput, in requests/s within the SLO."""
        return self.rate * self.share


FIGURES = (
    "ttft.p90_s",
    "tpot.p90_s",
    "e2e.p90_s",
    "throughput.output_tokens_per_s",
    "cost.usd_per_million_output_tokens",
    "cost.usd_per_1000_requests",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """Configuration whose highest rate is searched."""

    name: str
    scenarios: Mapping[int, Scenario]
    """Seed -> scenario with load=1; routers, predictors, clients and the traffic draw from the seed."""
    slo: Slo
    target: float
    """Share of the requests that must meet the SLO."""
    base_rate: float
    """Request rate with load=1, in requests/s."""
    num_devices: int
    warmup_share: float | None
    """Share of the first arrivals that is not counted; None: the settings of `metrics` apply."""
    slo_scales: tuple[float, ...]
    num_requests: int
    """Number of requests of the workload."""
    max_requests: int
    """Number of requests up to which its traffic is made longer."""
    requests_per_session: float | None = None
    """Mean number of requests of a session; None: requests arrive one by one."""
    is_trace: bool = False
    """True if all seeds give the same runs, so that their intervals come from blocks of their requests."""

    def measure(self, seed: int, rate: float, num_requests: int | None) -> Measured:
        """Simulates a run at a rate, in requests/s. Raises KeyboardInterrupt after Ctrl-C."""
        try:
            scenario, source, period = longer_traffic(self.scenarios[seed], num_requests or self.num_requests)
        except ValueError as error:
            raise ConfigError(f"workload: {error}") from error
        own_rate = rate_of(source)  # the rate of these requests, which may cover only a part of a day
        if own_rate is None:
            raise ConfigError(
                f"workload: {num_requests} requests have no rate; use a workload with more requests"
            )
        result = run(scenario, faster(source, rate / own_rate))
        return self._measured(result, rate, last_begin_s(source) * own_rate / rate, period)

    def measure_steady(self, seed: int, rate: float, num_requests: int) -> Measured:
        """Measures as `measure` does, with more requests if a run that attains the SLO is too short."""
        return steady_run(partial(self.measure, seed, rate), num_requests, self.max_requests, self.attains)

    def _measured(self, result: RunResult, rate: float, until_s: float, period: int | None) -> Measured:
        """Returns the figures of a run. until_s: arrival of its last request, or last session.

        period: number of requests after which its traffic repeats, if it does.
        """
        table, summary = to_pandas(result.requests).sort_values("arrival_s", kind="stable"), result.summary
        trimmed, has_sessions = summary["trimmed"], self.requests_per_session is not None
        if self.warmup_share is None:
            inside = (table["arrival_s"] >= trimmed["start_s"]) & (table["arrival_s"] <= trimmed["end_s"])
            counted = table[inside] if inside.any() else table
        else:
            counted = table.iloc[int(self.warmup_share * len(table)) :]
        lack = lack_of(table, until_s, has_sessions=has_sessions, target=self.target)
        if has_sessions and lack is None:  # only while as many sessions begin as end
            inside = steady_part(table, until_s, has_sessions=True).holds(counted["arrival_s"].to_numpy())
            counted = counted[inside]
        num_counted = len(counted)
        share = float(self.slo.met(counted).mean())
        figures = {key: _figure(summary, counted, key) for key in FIGURES}
        return Measured(
            rate=rate,
            share=share,
            is_overloaded=result.records.overload is not None,
            term_shares={
                term: float(met.sum()) / num_counted for term, met in self.slo.terms_met(counted).items()
            },
            scale_shares={
                scale: float(scaled(self.slo, scale).met(counted).mean()) for scale in self.slo_scales
            },
            figures=figures,
            notes=tuple(summary["notes"]),
            num_requests=len(table),
            lasts_s=until_s,
            least_s=needed_s(table, has_sessions=has_sessions),
            is_attained=share >= self.target,
            lack=lack,
            intervals=_intervals(TraceRun.of(result, counted), share, figures, period)
            if self.is_trace
            else {},
        )

    def attains(self, measured: Measured) -> bool:
        """Returns whether the requests of a run attain the SLO."""
        return not measured.is_overloaded and measured.is_attained

    def keeps(self, measured: Measured) -> bool:
        """Returns whether a run shows that the service attains the SLO at its rate."""
        return self.attains(measured) and measured.lack is None


class Rough(NamedTuple):
    """Bracket of an arm's highest rate, and the number of requests that a run at this rate needs."""

    bracket: Bracket
    num_requests: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RoughSearch:
    """Task that brackets an arm's highest rate with one seed.

    num_requests: least number of requests of a run; it is raised until the run shows a steady state.
    """

    arm: Arm
    seed: int
    num_requests: int
    precision: float = 0.15

    @property
    def name(self) -> str:
        return f"arm {self.arm.name}, seed {self.seed}"

    def run(self) -> Rough:
        arm, least = self.arm, min(self.num_requests, self.arm.num_requests)
        runs: dict[float, Measured] = {}

        def keeps(rate: float) -> bool:
            """Runs as many requests as lower rates had, or as arrive in the time that they needed."""
            lower = [one for tried, one in runs.items() if tried <= rate]
            counts = [one.num_requests for one in lower]
            lasting = [stepped(rate * one.least_s) for one in lower if one.least_s > 0]
            most = max(arm.max_requests, *counts, 0)
            runs[rate] = arm.measure_steady(
                self.seed, rate, max(least, min(most, max([0, *counts, *lasting])))
            )
            return arm.keeps(runs[rate])

        bracket = bisected(keeps, bracketed(keeps, arm.base_rate, FACTOR), self.precision)
        return Rough(bracket, runs[bracket.low].num_requests if bracket.low else least)


class Found(NamedTuple):
    """Runs of an arm with one seed."""

    at_rates: Sequence[Measured]
    at_scale_rate: Measured | None
    highest: Measured | None  # run at the highest rate that meets the SLO; None if there is none
    above: Measured | None  # run at the lowest rate that misses the SLO; None if there is none


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Task that measures one rate of an arm's curve, with one seed."""

    arm: Arm
    seed: int
    rate: float
    num_requests: int

    @property
    def name(self) -> str:
        return f"arm {self.arm.name}, seed {self.seed}"

    def run(self) -> Measured:
        return self.arm.measure_steady(self.seed, self.rate, self.num_requests)


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """Task that searches an arm's highest rate, with one seed, between the rates of its curve."""

    arm: Arm
    seed: int
    rates: tuple[float, ...]
    scale_rate: float | None
    start: float
    precision: float
    num_requests: int
    """Requests of a run at the rate `near`; runs at lower rates have fewer, and last as long."""
    least_requests: int
    near: float
    """Rate near the highest one, in requests/s."""
    is_open: bool = False
    """True if no rate misses the SLO, so that there is nothing to search."""
    known: Mapping[float, Measured] = field(default_factory=dict)
    """The measured points, by rate."""

    @property
    def name(self) -> str:
        return f"arm {self.arm.name}, seed {self.seed}"

    @property
    def points(self) -> list[Point]:
        """The measurements of the curve, and at `scale_rate`: those that take longest come first."""
        rates = {*self.rates, *(() if self.scale_rate is None else (self.scale_rate,))}
        return [self._point(rate) for rate in sorted(rates, reverse=True)]

    def _point(self, rate: float) -> Point:
        lasting = min(1.0, rate / self.near) * self.num_requests
        num_requests = max(min(self.least_requests, self.num_requests), ceil(lasting))
        return Point(arm=self.arm, seed=self.seed, rate=rate, num_requests=num_requests)

    def run(self) -> Found:
        """Searches from the points on, all of which are known."""
        runs = dict(self.known)

        def keeps(rate: float) -> bool:
            if rate not in runs:
                runs[rate] = self._point(rate).run()
            return self.arm.keeps(runs[rate])

        bracket = self._bracket
        if bracket is None:
            kept = max(filter(keeps, self.rates), default=0.0)
            bracket = bracketed(keeps, kept or min(self.rates, default=self.start))
        return self._found(runs, bisected(keeps, bracket, self.precision))

    def of_points(self) -> Found:
        """Returns what the points alone show."""
        return self._found(self.known, self._bracket or Bracket(0.0, inf))

    @property
    def _bracket(self) -> Bracket | None:
        """The neighbours on the curve between which the highest rate is; None if it is beyond the curve."""
        low = max((rate for rate in self.rates if self.arm.keeps(self.known[rate])), default=0.0)
        missed = [rate for rate in self.rates if rate > low]
        if self.is_open and not missed:
            return Bracket(low, inf)
        return Bracket(low, min(missed)) if low and missed else None

    def _found(self, runs: Mapping[float, Measured], bracket: Bracket) -> Found:
        return Found(
            at_rates=[self.known[rate] for rate in sorted(self.rates)],
            at_scale_rate=None if self.scale_rate is None else self.known[self.scale_rate],
            highest=runs.get(bracket.low),
            above=runs.get(bracket.high),
        )


def _intervals(
    run: TraceRun, share: float, figures: Mapping[str, float | None], period: int | None
) -> dict[str, Interval]:
    """Returns the intervals of the figures of single requests of one run of a trace."""
    values = {"goodput.share": share, **figures}
    known = {key: value for key, value in values.items() if value is not None}
    return {key: trace_interval(run, key, value, period) for key, value in known.items()}


def scaled(slo: Slo, scale: float) -> Slo:
    """Returns the SLO with all limits multiplied by `scale`."""
    limits: dict[str, Any] = {f"{term}_ms": scale * 1e3 * limit_s for term, limit_s in slo.limits_s.items()}
    return replace(slo, **limits)


def rate_of(source: Source) -> float | None:
    """Returns the mean request rate until the last arrival, in requests/s; None if there is none.

    Of sessions, such as tasks of agents, it is that until the last one begins; a higher rate is one of more
    sessions per second.
    """
    last_s, count = last_begin_s(source), source.num_requests
    return count / last_s if last_s and count else None


def _figure(summary: Mapping[str, Any], counted: pd.DataFrame, key: str) -> float | None:
    """Returns a figure; latencies are those of the counted requests only."""
    section, _, name = key.partition(".")
    if f"{section}_s" in counted:
        known = counted[f"{section}_s"].dropna()
        return None if known.empty else float(known.quantile(int(name[1:3]) / 100))
    value = summary[section][name]
    return None if value is None else float(value)
