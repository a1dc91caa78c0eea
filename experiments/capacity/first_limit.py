"""Finds what limits a fleet that cannot be smaller: the limit that fails first if the traffic grows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from experiments.capacity.probe import Probe, Run, keeps
from experiments.capacity.results import Limit, limit_of_run
from experiments.capacity.search import Search, State
from experiments.study.bisection import FACTOR, bisected, bracketed
from experiments.study.workers import in_turn
from sim.engine.interrupt import Interrupt

PRECISION = 0.1
"""Relative width of the interval in which the largest multiple of the traffic is found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstLimit:
    """Largest traffic of a fleet with the least number of replicas, with the first seed."""

    load: float
    """Largest tried multiple of the traffic, margins included, at which the SLO is met."""
    limit: Limit | None
    """Limit of the SLO that fails first above it; None if no tried multiple fails."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowthTask:
    """Task that raises the load of a fleet, which meets the SLO, until it misses it."""

    name: str
    probe: Probe

    def run(self) -> tuple[float, Run | None]:
        """Returns the largest multiple that meets the SLO, and the run at the smallest that misses it."""
        runs: dict[float, Run] = {}

        def kept(multiple: float) -> bool:
            if multiple == 1:  # the search has shown it
                return True
            [runs[multiple]] = replace(self.probe, load=self.probe.load * multiple).run()
            return keeps(runs[multiple], self.probe.scenario.slo)

        bracket = bisected(kept, bracketed(kept, 1.0, FACTOR), PRECISION)
        return bracket.low, None if bracket.high == inf else runs[bracket.high]


def first_limit(search: Search, state: State, interrupt: Interrupt) -> FirstLimit | None:
    """Finds it for a candidate that needs the least number of replicas; otherwise, or on Ctrl-C, None."""
    if state.num_up is None or state.num_up != state.candidate.least_up or interrupt.noted:
        return None
    probe = replace(search.probe(state, state.num_up), seeds=search.seeds[:1])
    task = GrowthTask(name=f"{state.candidate.name}, more traffic", probe=probe)
    for _, (load, failing) in in_turn(GrowthTask.run, [task], 1, interrupt):
        return FirstLimit(load=load, limit=None if failing is None else limit_of_run(failing, state))
    return None
