"""One configuration with one seed: its figures at given rates, and the highest at which the SLO is kept.

Every run of a seed has the same requests, only closer together (common random numbers), so the share within
the SLO falls with the rate with little noise, and bisection finds where it crosses the target. A run that is
overloaded is ended early: whatever it measured, it is above.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, log2
from typing import Any, NamedTuple

import pandas as pd

from experiments.study.bisection import FACTOR, Bracket, bisected, bracketed
from sim.metrics.result import RunResult
from sim.metrics.slo import Slo
from sim.settings.build import build
from sim.settings.errors import ConfigError
from sim.settings.scenario import run
from sim.setup.scenario import Scenario
from sim.workload.base import Source
from sim.workload.faster import FasterSource

ANSWERS = 10
"""Traffic lasts so many times as long as nine in ten answers take: a shorter one ends before it is felt."""
FINER = 1.25
"""Steps to either side where the rate is already known from shorter runs."""


class Measured(NamedTuple):
    """A run."""

    rate: float  # requests/s that arrived
    share: float  # of them, within the SLO
    is_overloaded: bool
    term_shares: Mapping[str, float]
    scale_shares: Mapping[float, float]  # by multiple of the SLO's limits
    figures: Mapping[str, float | None]  # others, by dotted key of summary.json
    notes: Sequence[str]

    @property
    def goodput_per_s(self) -> float:
        """Requests/s within the SLO."""
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
    """A configuration, and what is measured of it."""

    name: str
    scenarios: Mapping[int, Scenario]
    """By seed, with load=1: routers, predictors and clients draw from it as well as the traffic."""
    workload: Mapping[str, Any]
    """The node that its traffic was built from."""
    slo: Slo
    target: float
    base_rate: float
    """Requests/s with load=1."""
    num_devices: int
    warmup_share: float | None
    """Of the first arrivals, which are not counted; None: what `metrics` trims."""
    slo_scales: tuple[float, ...]
    limit_key: str | None
    """Of `workload`, that says how many requests there are; None: always all."""
    num_requests: int
    """That there are at most."""

    def measure(self, seed: int, rate: float, num_requests: int) -> Measured:
        """A run at that rate. Raises KeyboardInterrupt if Ctrl-C cut it short."""
        scenario = self.scenarios[seed]
        if self.limit_key is not None:
            workload = build({**self.workload, self.limit_key: num_requests}, "workload")
            scenario = replace(scenario, workload=workload)
        source = scenario.source()
        own_rate = rate_of(source)  # of these requests, which may be a part of a day
        if own_rate is None:
            raise ConfigError(
                f"workload: {num_requests} requests have no rate; use a workload with more requests"
            )
        result = run(scenario, FasterSource(source, rate / own_rate))
        if result.records.interrupted:
            raise KeyboardInterrupt  # its figures are of a part
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
        """Whether the SLO is attained."""
        return not measured.is_overloaded and measured.share >= self.target


class Rough(NamedTuple):
    """About where an arm's highest rate is, and how many requests a run there needs."""

    bracket: Bracket
    num_requests: int
    is_long: bool
    """Whether the workload has so many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoughSearch:
    """A task: by one seed. num_requests: of a run, at least; more where it would not last for `ANSWERS`."""

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
    """Rounded up to a power of the square root of two: arms of about the same rate get the same requests."""
    return ceil(2 ** (ceil(2 * log2(number)) / 2))


class Found(NamedTuple):
    """Of an arm with a seed."""

    at_rates: Sequence[Measured]
    at_scale_rate: Measured | None
    highest: Measured | None  # at the highest rate that keeps the target; None: there is none
    above: Measured | None  # at the lowest rate found to miss it


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """A task: an arm's curve and its highest rate, by one seed."""

    arm: Arm
    seed: int
    rates: tuple[float, ...]
    scale_rate: float | None
    start: float
    precision: float
    num_requests: int
    """Of a run at the largest rate that the arm keeps, about `near`; slower ones last as long with fewer."""
    least_requests: int
    near: float
    is_open: bool = False
    """No rate was found to miss the SLO: there is nothing to search."""

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
    """All limits so many times as large."""
    limits: dict[str, Any] = {f"{term}_ms": scale * 1e3 * limit_s for term, limit_s in slo.limits_s.items()}
    return replace(slo, **limits)


def rate_of(source: Source) -> float | None:
    """Requests/s from the start to the last arrival; None where there is no such rate."""
    last_s, count = source.last_arrival_s, source.num_requests
    return count / last_s if last_s and count else None


def _figure(summary: Mapping[str, Any], counted: pd.DataFrame, key: str) -> float | None:
    """Latencies are of the requests that the share counts."""
    section, _, name = key.partition(".")
    if f"{section}_s" in counted:
        known = counted[f"{section}_s"].dropna()
        return None if known.empty else float(known.quantile(int(name[1:3]) / 100))
    value = summary[section][name]
    return None if value is None else float(value)
