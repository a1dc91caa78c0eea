"""Searches the highest rate of each arm: roughly with one seed, then precisely with every seed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Protocol

from experiments.goodput.results import Highest, highest_of
from experiments.goodput.search import Arm, Found, Measured, Rough, RoughSearch, Search
from experiments.goodput.settings import GoodputSettings
from experiments.study.bisection import FACTOR, Bracket
from experiments.study.launchers.launcher import Launcher
from experiments.study.launchers.outcome import Task
from experiments.study.seeds import distinct_seeds
from experiments.study.workers import Report, in_turn
from sim.engine.clock import Interrupt, ctrl_c_noted

AROUND = (0.1, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.15, 1.3)
"""Rates of a curve as multiples of the highest rate; they are denser where the attainment falls."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Results of a search."""

    settings: GoodputSettings
    arms: Sequence[Arm]
    found: dict[str, list[Found]]
    """Arm -> results in the order of the seeds; incomplete after Ctrl-C."""
    scale_rate: float | None
    highest: Sequence[Highest]
    interrupted: bool
    is_one_run: bool = False
    """True if all seeds give the same runs, so that only the first was used."""

    @property
    def notes(self) -> dict[str, list[str]]:
        """Notes on the first run of each arm."""
        runs = {arm.name: self.found[arm.name][0].at_rates for arm in self.arms}
        return {name: list(at_rates[0].notes) for name, at_rates in runs.items() if at_rates}


def search(settings: GoodputSettings, arms: Sequence[Arm], report: Report) -> Outcome | None:
    """Searches all arms with all seeds; returns None after Ctrl-C before the first result."""
    given = len(settings.seeds)
    settings = replace(
        settings, seeds=distinct_seeds([arm.scenarios.__getitem__ for arm in arms], settings.seeds)
    )
    if len(settings.seeds) < given:
        arms = [replace(arm, is_trace=True) for arm in arms]
    rough_seed = settings.seeds[0]
    with ctrl_c_noted() as interrupt:
        rough: dict[str, Rough] = {}
        rough_tasks = [
            RoughSearch(arm=arm, seed=rough_seed, num_requests=settings.requests or arm.num_requests)
            for arm in arms
        ]
        num_points = settings.num_rates if settings.rates is None else len(settings.rates)
        total = len(arms) * (1 + len(settings.seeds) * (num_points + 1))  # about
        for index, about in in_turn(RoughSearch.run, rough_tasks, settings.runs_on, interrupt):
            rough[arms[index].name] = about
            report(len(rough), total)
        if len(rough) < len(arms):
            return None
        is_open = {name: one.bracket.high == inf for name, one in rough.items()}
        lows = [arm.base_rate if is_open[arm.name] else rough[arm.name].bracket.low for arm in arms]
        scale_rate = settings.scale_rate or min(filter(None, lows), default=None)
        tasks = [
            Search(
                arm=arm,
                seed=seed,
                rates=_rates(settings, rough[arm.name].bracket, arm.base_rate),
                scale_rate=scale_rate,
                start=arm.base_rate,
                precision=settings.precision,
                num_requests=rough[arm.name].num_requests,
                least_requests=settings.requests or arm.num_requests,
                near=arm.base_rate
                if is_open[arm.name]
                else 0.9 * rough[arm.name].bracket.low or arm.base_rate,
                is_open=is_open[arm.name],
            )
            for seed in settings.seeds
            for arm in arms
        ]
        total = len(arms) + sum(len(one.points) + 1 for one in tasks)
        done = _searched(tasks, settings.runs_on, interrupt, lambda ended: report(len(arms) + ended, total))
    by_arm = {arm.name: [done[i] for i in sorted(done) if tasks[i].arm is arm] for arm in arms}
    searched = [arm for arm in arms if by_arm[arm.name]]
    if not searched:
        return None
    return Outcome(
        settings=settings,
        arms=searched,
        found=by_arm,
        scale_rate=scale_rate,
        highest=highest_of(searched, by_arm),
        interrupted=interrupt.noted,
        is_one_run=len(settings.seeds) < given,
    )


def _searched(
    searches: Sequence[Search], launcher: Launcher, interrupt: Interrupt, report: Callable[[int], None]
) -> dict[int, Found]:
    """Returns the results of searches by their index: all points in parallel, then each search from its own.

    After Ctrl-C: the results of those that have ended, and what the points show of arms of which none has.
    report: gets the number of ended tasks.
    """
    waiting = deque((i, point) for i, one in enumerate(searches) for point in one.points)
    ready = deque(i for i, one in enumerate(searches) if not one.points)
    known: list[dict[float, Measured]] = [{} for _ in searches]
    done: dict[int, Found] = {}
    given: list[int] = []

    def tasks() -> Iterator[_Task | None]:
        while True:
            if ready:
                given.append(ready.popleft())
                yield replace(searches[given[-1]], known=known[given[-1]])
            elif waiting:
                index, point = waiting.popleft()
                given.append(index)
                yield point
            else:
                yield None

    for ended, (task, found) in enumerate(in_turn(_run, tasks(), launcher, interrupt), start=1):
        index = given[task]
        if isinstance(found, Found):
            done[index] = found
        else:
            known[index][found.rate] = found
            if len(known[index]) == len(searches[index].points):
                ready.append(index)
        report(ended)
    ended_arms = {searches[index].arm.name for index in done}
    for index, one in enumerate(searches):
        if one.arm.name not in ended_arms and len(known[index]) == len(one.points) > 0:
            done[index] = replace(one, known=known[index]).of_points()
    return done


class _Task(Task, Protocol):
    """A point or a search."""

    def run(self) -> Measured | Found:
        """Returns what it finds."""
        ...


def _run(task: _Task) -> Measured | Found:
    return task.run()


def _rates(settings: GoodputSettings, rough: Bracket, base_rate: float) -> tuple[float, ...]:
    """Returns the rates of an arm's curve, in requests/s. base_rate: the request rate of its workload."""
    if settings.rates is not None:
        return tuple(sorted(settings.rates))
    if rough.high == inf:  # no rate misses the SLO, so there is no region of interest
        return tuple(base_rate * FACTOR**i for i in range(settings.num_rates))
    middle = (rough.low * rough.high) ** 0.5 if rough.low > 0 else 0.0
    if not middle:
        return ()  # no rate meets the SLO
    positions = [i * (len(AROUND) - 1) / (settings.num_rates - 1) for i in range(settings.num_rates)]
    shares = [
        AROUND[int(p)] + (p - int(p)) * (AROUND[min(int(p) + 1, len(AROUND) - 1)] - AROUND[int(p)])
        for p in positions
    ]
    return tuple(middle * share for share in shares)
