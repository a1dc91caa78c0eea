"""Answers a capacity question: searches at every load of the forecast and measures the ranked candidates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import numpy as np

from experiments.capacity.advice import Advice, advise
from experiments.capacity.candidates import Candidate, Question
from experiments.capacity.first_limit import FirstLimit, first_limit
from experiments.capacity.optuna_search import propose
from experiments.capacity.precision import Unchanged, cheapest_unchanged
from experiments.capacity.probe import Probe, Run, distinct_seeds, keeps, sessions_of, traffic
from experiments.capacity.results import Ranked, ranked_of
from experiments.capacity.search import Search, State, begin, sets_formats
from experiments.capacity.settings import CapacitySettings
from experiments.capacity.within_error import start_doubt
from experiments.study.notes import merged_notes
from experiments.study.workers import Report, in_turn
from sim.engine.clock import Interrupt, ctrl_c_noted
from sim.settings.errors import ConfigError

HOUR_S = 3600
LEAST_HOURS = 2
LAST_GAP_S = 60
"""Longest gap between the last request and the end of its hour with which the hour still counts as full."""
LEAST_SAVED = 0.005
"""Least share of the cost that is worth mentioning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Day:
    """Replicas by hour of the workload; `fixed`: replicas without scaling."""

    replicas: Sequence[int]
    fixed: int

    @property
    def saved_share(self) -> float:
        """Share of the cost that scaling saves."""
        return 1 - sum(self.replicas) / (self.fixed * len(self.replicas))

    @property
    def overrides(self) -> str:
        """Overrides of `windtunnel simulate`, with an entry for each hour at which the number changes."""
        changes = [
            f"{{at:'{hour:02d}:00',replicas:{count}}}"
            for hour, count in enumerate(self.replicas[:24])
            if hour == 0 or count != self.replicas[hour - 1]
        ]
        return (
            f"replicas={self.replicas[0]} scaling=scheduled scaling.max_replicas={max(self.replicas)} "
            f'"scaling.entries=[{",".join(changes)}]"'
        )

    @property
    def sentence(self) -> str:
        """A sentence on what scaling saves, and how to simulate it."""
        return (
            f"Scaling the replicas with the traffic over the day ({min(self.replicas)} to "
            f"{max(self.replicas)}) would save about {100 * self.saved_share:.0f} % of the cost; to simulate "
            f"it, add: {self.overrides}"
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the replicas by hour as plain values."""
        return {
            "replicas": list(self.replicas),
            "saved_share": self.saved_share,
            "overrides": self.overrides,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Result for one month of the forecast."""

    month: int
    load: float
    """Multiple of the workload's traffic."""
    cheapest: str | None
    """Name of the cheapest candidate; None if none meets the SLO."""
    replicas: int
    usd_per_hour: float
    grown_replicas: int | None
    """Replicas of the first month's winner at this load; None if they are not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Results of all searches, and the figures of the ranked candidates."""

    question: Question
    search: Search
    """Search at the first month's load."""
    ranked: Sequence[Ranked]
    stages: Sequence[Stage]
    seeds: tuple[int, ...]
    """Seeds that give different runs."""
    requests: int
    """Number of requests of a run with the first seed."""
    window_start_s: float
    lasts_s: float
    kept_with_one_less: tuple[int, int] | None
    """Winner with one replica fewer: seeds that meet the SLO, all seeds; None if that is not possible."""
    day: Day | None
    advice: Advice | None
    points: Mapping[str, Sequence[Run]]
    """Candidate that meets the SLO -> the runs that the Pareto figure shows."""
    unchanged: Unchanged | None
    """Cheapest fleet with the checkpoint's number formats, if the winner has others."""
    first_limit: FirstLimit | None
    """Limit of the winner if it cannot be smaller."""
    notes: Sequence[str]
    interrupted: bool
    lack: str | None = None
    """Why the runs of the winner do not show a steady state; None if they do."""

    @property
    def is_trace(self) -> bool:
        """True if all seeds give the same runs, so that there is one of each fleet."""
        return len(self.seeds) < len(self.question.settings.seeds)


def answer(question: Question, report: Report) -> Answer | None:
    """Searches and measures; returns None after Ctrl-C before the first result.

    Raises ConfigError if the traffic cannot be read.
    """
    settings = question.settings
    scenario = question.candidates[0].scenario
    try:
        seeds = distinct_seeds([one.scenario for one in question.candidates], settings)
        source, start_s = traffic(scenario, seeds[0], settings.window_s)
        whole = sessions_of(scenario)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    with ctrl_c_noted() as interrupt:
        searches: list[Search] = []
        for load in settings.loads.values():
            states: Sequence[State] = (
                searches[-1].states if searches and settings.growth_per_month > 0 else ()
            )
            if interrupt.noted:
                break
            search = begin(question, load, seeds, states)
            searches.append(search)
            if settings.search == "optuna":
                propose(search, interrupt, report)
            else:
                search.exhaust(interrupt, report)
        if not searches:
            return None
        first = searches[0]
        finals = _finals(first, interrupt)
        ranked = ranked_of(first, finals)
        if doubtful := [row.candidate.name for row in ranked if start_doubt(row.candidate)]:
            ranked = ranked_of(first, finals, last=doubtful)
        winner = ranked[0] if ranked else None
        day = None
        if winner is not None:
            day = day_of(winner.candidate, winner.num_up, settings, seeds[0])
        kept = None if winner is None else _kept_with_one_less(first, winner, interrupt)
        unchanged = None
        if winner is None or sets_formats(state_of(first, winner)):
            unchanged = cheapest_unchanged(first, interrupt)
        limits = None if winner is None else first_limit(first, state_of(first, winner), interrupt)
        advice = None if first.ranked() or first.interrupted else advise(first, interrupt)
        was_interrupted = interrupt.noted
    return Answer(
        question=question,
        search=first,
        ranked=ranked,
        stages=[
            _stage(month, search, winner) for month, search in zip(settings.loads, searches, strict=False)
        ],
        seeds=seeds,
        requests=(len(source.listed) if whole is None else whole.num_requests) or 0,
        window_start_s=start_s,
        lasts_s=source.last_arrival_s or 0.0,
        kept_with_one_less=kept,
        day=day,
        advice=advice,
        points={
            s.candidate.name: finals.get(s.candidate.name) or s.runs[s.num_up or 0] for s in first.ranked()
        },
        notes=merged_notes({row.candidate.name: finals[row.candidate.name][0].notes for row in ranked}),
        unchanged=unchanged,
        first_limit=limits,
        interrupted=was_interrupted,
        lack=None if winner is None else _lack(state_of(first, winner)),
    )


def _lack(state: State) -> str | None:
    """Returns why a run of a fleet that was found does not show a steady state; None if all do."""
    lacks = (run.lack for run in state.runs[state.num_up or 0])
    return next((lack.reason for lack in lacks if lack is not None), None)


def _finals(search: Search, interrupt: Interrupt) -> dict[str, list[Run]]:
    """Simulates the ranked candidates with all replicas and without headroom, by candidate.

    Runs of the search are reused if they have the same replicas and no headroom.
    """
    settings = search.question.settings
    found: dict[str, list[Run]] = {}
    probes: dict[str, Probe] = {}
    for state in search.ranked()[: settings.top]:
        assert state.num_up is not None
        replicas = search.replicas(state)
        if replicas == state.num_up and settings.headroom == 0:
            found[state.candidate.name] = state.runs[state.num_up]
        else:
            probe = search.probe(state, replicas)
            probes[state.candidate.name] = replace(probe, load=search.load, stop=False)
    tasks = [replace(probe, seeds=(seed,)) for probe in probes.values() for seed in search.seeds]
    runs = {i: run for i, [run] in in_turn(Probe.run, tasks, settings.runs_on, interrupt)}
    for number, name in enumerate(probes):
        first = number * len(search.seeds)
        of_all = range(first, first + len(search.seeds))
        if runs.keys() >= {*of_all}:
            found[name] = [runs[i] for i in of_all]
    return found


def _kept_with_one_less(search: Search, winner: Ranked, interrupt: Interrupt) -> tuple[int, int] | None:
    """Returns in how many seeds, and of how many, the winner meets the SLO with one replica fewer."""
    if winner.num_up == winner.candidate.least_up or len(search.seeds) < 2:
        return None
    state = state_of(search, winner)
    tasks = [replace(search.probe(state, winner.num_up - 1), seeds=(seed,)) for seed in search.seeds]
    slo = search.question.slo
    found = [
        all(keeps(one, slo) for one in runs)
        for _, runs in in_turn(Probe.run, tasks, search.question.settings.runs_on, interrupt)
    ]
    return sum(found), len(found)


def state_of(search: Search, winner: Ranked) -> State:
    """Returns the winner's state in a search at any load."""
    return next(s for s in search.states if s.candidate is winner.candidate)


def _stage(month: int, search: Search, winner: Ranked | None) -> Stage:
    ranked = search.ranked()
    same = None if winner is None else state_of(search, winner)
    grown = None if same is None or same.num_up is None else search.replicas(same)
    if not ranked:
        return Stage(
            month=month, load=search.load, cheapest=None, replicas=0, usd_per_hour=0.0, grown_replicas=grown
        )
    best = ranked[0]
    return Stage(
        month=month,
        load=search.load,
        cheapest=best.candidate.name,
        replicas=search.replicas(best),
        usd_per_hour=search.least_cost(best),
        grown_replicas=grown,
    )


def day_of(candidate: Candidate, num_up: int, settings: CapacitySettings, seed: int) -> Day | None:
    """Estimates the replicas of each hour if they are scaled with its traffic.

    Each hour gets the replicas of the busiest hour times its share of that hour's tokens, rounded up, plus
    the spares. The estimate ignores cold starts, and that small fleets need relatively more replicas;
    `scaling=scheduled` with these entries simulates both. A last hour that is not full is left out. Returns
    None if the plan is not for the busiest hour, the traffic has fewer than two full hours, or scaling saves
    nothing.
    """
    if settings.window_s != HOUR_S:
        return None
    whole, _ = traffic(candidate.scenario, seed, None)
    num_hours = int((whole.listed[-1].at_s + LAST_GAP_S) // HOUR_S) if whole.listed else 0
    if num_hours < LEAST_HOURS:
        return None
    at_s = np.array([arrival.at_s for arrival in whole.listed])
    tokens = np.array([a.request.prompt.num_tokens + a.num_output_tokens for a in whole.listed], np.float64)
    by_hour = np.bincount((at_s // HOUR_S).astype(np.int64), weights=tokens)[:num_hours]
    window, _ = traffic(candidate.scenario, seed, settings.window_s)
    peak = sum(a.request.prompt.num_tokens + a.num_output_tokens for a in window.listed)
    least = candidate.least_up
    needed = [max(least, ceil(num_up * min(1.0, float(own) / peak) - 1e-9)) for own in by_hour]
    day = Day(
        replicas=[candidate.deployed(count, settings) for count in needed],
        fixed=candidate.deployed(num_up, settings),
    )
    return day if day.saved_share >= LEAST_SAVED else None
