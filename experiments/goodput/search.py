"""Searches the highest rate at which one arm meets the SLO with one seed, and measures it at given rates.

Every run of a seed has the same requests, only with shorter gaps (common random numbers). The share within
the SLO therefore falls with the rate with little noise, and bisection finds where it crosses the target. A
run that becomes overloaded is ended early, and counts as a miss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, log2
from typing import Any, NamedTuple

import pandas as pd

from experiments.study.bisection import FACTOR, Bracket, bisected, bracketed
from experiments.study.run_length import ANSWERS
from sim.metrics.result import RunResult
from sim.metrics.slo import Slo
from sim.settings.build import build
from sim.settings.errors import ConfigError
from sim.settings.scenario import run
from sim.setup.scenario import Scenario
from sim.workload.base import BeginsByRate, Source
from sim.workload.faster import faster

FINER = 1.25
"""Factor between rates if the highest rate is already known roughly from shorter runs."""


class Measured(NamedTuple):
    """Figures of one run."""

    rate: float  # arrivals, in requests/s
    share: float  # share of the requests within the SLO
    is_overloaded: bool
    term_shares: Mapping[str, float]  # SLO term -> share of the requests within its limit
    scale_shares: Mapping[float, float]  # multiple of the SLO's limits -> share of the requests within them
    figures: Mapping[str, float | None]  # dotted key of summary.json -> value
    notes: Sequence[str]

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
    workload: Mapping[str, Any]
    """Config node of its workload."""
    slo: Slo
    target: float
    """Share of the requests that must meet the SLO."""
    base_rate: float
    """Request rate with load=1, in requests/s."""
    num_devices: int
    warmup_share: float | None
    """Share of the first arrivals that is not counted; None: the settings of `metrics` apply."""
    slo_scales: tuple[float, ...]
    limit_key: str | None
    """Setting of the workload with its number of requests; None: the number cannot be set."""
    num_requests: int
    """Largest number of requests of the workload."""

    def measure(self, seed: int, rate: float, num_requests: int) -> Measured:
        """Simulates a run at a rate, in requests/s. Raises KeyboardInterrupt after Ctrl-C."""
        scenario = self.scenarios[seed]
        if self.limit_key is not None:
            workload = build({**self.workload, self.limit_key: num_requests}, "workload")
            scenario = replace(scenario, workload=workload)
        source = scenario.source()
        own_rate = rate_of(source)  # the rate of these requests, which may cover only a part of a day
        if own_rate is None:
            raise ConfigError(
                f"workload: {num_requests} requests have no rate; use a workload with more requests"
            )
        result = run(scenario, faster(source, rate / own_rate))
        return self._measured(result, rate)

    def _measured(self, result: RunResult, rate: float) -> Measured:
        table, summary = result.requests.sort_values("arrival_s", kind="stable"), result.summary
        trimmed = summary["trimmed"]
        if self.warmup_share is None:
            inside = (table["arrival_s"] >= trimmed["start_s"]) & (table["arrival_s"] <= trimmed["end_s"])
            counted = table[inside] if inside.any() else table
        else:
            counted = table.iloc[int(self.warmup_share * len(table)) :]
        num_counted = len(counted)
        return Measured(
            rate=rate,
            share=float(self.slo.met(counted).mean()),
            is_overloaded=result.records.overload is not None,
            term_shares={
                term: float(met.sum()) / num_counted for term, met in self.slo.terms_met(counted).items()
            },
            scale_shares={
                scale: float(scaled(self.slo, scale).met(counted).mean()) for scale in self.slo_scales
            },
            figures={key: _figure(summary, counted, key) for key in FIGURES},
            notes=tuple(summary["notes"]),
        )

    def keeps(self, measured: Measured) -> bool:
        """Returns whether a run attains the SLO."""
        return not measured.is_overloaded and measured.share >= self.target


class Rough(NamedTuple):
    """Bracket of an arm's highest rate, and the number of requests that a run at this rate needs."""

    bracket: Bracket
    num_requests: int
    is_long: bool
    """True if the workload has enough requests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoughSearch:
    """Task that brackets an arm's highest rate with one seed.

    num_requests: least number of requests of a run; it is raised until the run lasts long enough (`ANSWERS`).
    """

    arm: Arm
    seed: int
    num_requests: int
    precision: float = 0.15

    @property
    def name(self) -> str:
        return f"arm {self.arm.name}, seed {self.seed}"

    def run(self) -> Rough:
        arm, start, factor = self.arm, self.arm.base_rate, FACTOR
        num_requests = min(self.num_requests, arm.num_requests)
        while True:
            runs: dict[float, Measured] = {}

            def keeps(rate: float, runs: dict[float, Measured] = runs, num: int = num_requests) -> bool:
                runs[rate] = arm.measure(self.seed, rate, num)
                return arm.keeps(runs[rate])

            bracket = bisected(keeps, bracketed(keeps, start, factor), self.precision)
            if bracket.high == inf:
                if num_requests == arm.num_requests:
                    return Rough(bracket, num_requests, False)
                num_requests = min(2 * num_requests, arm.num_requests)
                continue
            e2e_s = runs[bracket.low].figures["e2e.p90_s"] if bracket.low else None
            needed = 0 if e2e_s is None else stepped(ANSWERS * e2e_s * bracket.low)
            if needed <= num_requests or num_requests == arm.num_requests:
                return Rough(bracket, num_requests, needed <= num_requests)
            num_requests, start = min(max(needed, 2 * num_requests), arm.num_requests), bracket.low
            factor = FINER


def stepped(number: float) -> int:
    """Rounds up to a power of the square root of two, so that arms of similar rates get the same requests."""
    return ceil(2 ** (ceil(2 * log2(number)) / 2))


class Found(NamedTuple):
    """Runs of an arm with one seed."""

    at_rates: Sequence[Measured]
    at_scale_rate: Measured | None
    highest: Measured | None  # run at the highest rate that meets the SLO; None if there is none
    above: Measured | None  # run at the lowest rate that misses the SLO; None if there is none


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """Task that measures an arm's curve and searches its highest rate, with one seed."""

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

    @property
    def name(self) -> str:
        return f"arm {self.arm.name}, seed {self.seed}"

    def run(self) -> Found:
        runs: dict[float, Measured] = {}

        def at(rate: float) -> Measured:
            if rate not in runs:
                lasting = min(1.0, rate / self.near) * self.num_requests
                num_requests = max(min(self.least_requests, self.num_requests), ceil(lasting))
                runs[rate] = self.arm.measure(self.seed, rate, num_requests)
            return runs[rate]

        def keeps(rate: float) -> bool:
            return self.arm.keeps(at(rate))

        curve = [at(rate) for rate in sorted(self.rates)]
        kept = [one.rate for one in curve if self.arm.keeps(one)]
        low = max(kept, default=0.0)
        missed = [one.rate for one in curve if one.rate > low]
        if self.is_open and not missed:
            bracket = Bracket(low, inf)
        elif low and missed:
            bracket = Bracket(low, min(missed))
        else:
            bracket = bracketed(keeps, low or min(self.rates, default=self.start))
        bracket = bisected(keeps, bracket, self.precision)
        return Found(
            at_rates=curve,
            at_scale_rate=None if self.scale_rate is None else at(self.scale_rate),
            highest=runs.get(bracket.low),
            above=runs.get(bracket.high),
        )


def scaled(slo: Slo, scale: float) -> Slo:
    """Returns the SLO with all limits multiplied by `scale`."""
    limits: dict[str, Any] = {f"{term}_ms": scale * 1e3 * limit_s for term, limit_s in slo.limits_s.items()}
    return replace(slo, **limits)


def rate_of(source: Source) -> float | None:
    """Returns the mean request rate until the last arrival, in requests/s; None if there is none.

    Of sessions, such as tasks of agents, it is that until the last one begins; a higher rate is one of more
    sessions per second.
    """
    begins_s = source.last_begin_s if isinstance(source, BeginsByRate) else None
    last_s, count = source.last_arrival_s or begins_s, source.num_requests
    return count / last_s if last_s and count else None


def _figure(summary: Mapping[str, Any], counted: pd.DataFrame, key: str) -> float | None:
    """Returns a figure; latencies are those of the counted requests only."""
    section, _, name = key.partition(".")
    if f"{section}_s" in counted:
        known = counted[f"{section}_s"].dropna()
        return None if known.empty else float(known.quantile(int(name[1:3]) / 100))
    value = summary[section][name]
    return None if value is None else float(value)
