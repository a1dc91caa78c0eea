"""Finds what limits a fleet that cannot be smaller: the limit that fails first if the traffic grows.

More traffic is the same requests at shorter gaps. A window that shrinks to a burst is no load, so it is drawn
on or repeated until the run shows a steady state (`experiments.study.steady_state`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

from experiments.capacity.probe import Probe, Run, keeps
from experiments.capacity.results import Limit, limit_of_run
from experiments.capacity.search import Search, State
from experiments.study.bisection import FACTOR, bisected, bracketed
from experiments.study.steady_state import steady_run
from experiments.study.workers import in_turn
from sim.engine.clock import Interrupt
from sim.report.numbers import decimals_of, rounded
from sim.report.wording import LATENCIES

PRECISION = 0.1
"""Relative width of the interval in which the largest multiple of the traffic is found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstLimit:
    """Largest traffic of a fleet with the least number of replicas, with the first seed."""

    load: float
    """Largest tried multiple of the traffic, margins included, at which the SLO is met."""
    limit: Limit | None
    """Limit of the SLO that fails first above it; None if no tried multiple fails."""
    lack: str | None = None
    """Why no run shows the steady state of more traffic; `load` is then a lower bound. None: one does."""

    def to_json(self) -> dict[str, Any]:
        """Returns the limit as plain values."""
        return {
            "load": self.load,
            "too_short": self.lack,
            "limit": self.limit and self.limit._asdict(),
        }


def growth_sentence(first: FirstLimit, num_up: int, *, has_margins: bool) -> str:
    """Returns a sentence on the traffic that a fleet of num_up replicas meets, and what fails beyond it."""
    fewest = "One replica is" if num_up == 1 else f"{num_up} replicas are"
    multiple = rounded(first.load, decimals_of(PRECISION * first.load))
    least, margin = "at least " * (first.lack is not None), " with its margins" * has_margins
    meets = f"{fewest} the minimum, and the SLO is met up to {least}{multiple} times the traffic{margin}"
    if first.lack is not None:
        return (
            f"{meets}; the traffic is too short to show more: {first.lack}; raise capacity.max_requests, or "
            "use a workload with more requests."
        )
    if first.limit is None:
        return f"{meets}; more was not tried."
    return f"{meets}; beyond that {LATENCIES[first.limit.term]} fails first ({first.limit.resource})."


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowthTask:
    """Task that raises the load of a fleet, which meets the SLO, until it misses it."""

    name: str
    probe: Probe
    max_requests: int

    def run(self) -> tuple[float, Run | None]:
        """Returns the largest multiple that meets the SLO, and the run at the smallest that does not."""
        runs: dict[float, Run] = {}

        def kept(multiple: float) -> bool:
            if multiple == 1:  # the search has shown it
                return True
            longest = max((one.num_requests for tried, one in runs.items() if tried < multiple), default=None)
            run = partial(self._run, self.probe.load * multiple)
            runs[multiple] = steady_run(run, longest, self.max_requests, self._attains)
            return self._attains(runs[multiple]) and runs[multiple].lack is None

        bracket = bisected(kept, bracketed(kept, 1.0, FACTOR), PRECISION)
        return bracket.low, None if bracket.high == inf else runs[bracket.high]

    def _run(self, load: float, num_requests: int | None) -> Run:
        [found] = replace(self.probe, load=load, num_requests=num_requests).run()
        return found

    def _attains(self, run: Run) -> bool:
        return keeps(run, self.probe.scenario.slo)


def first_limit(search: Search, state: State, interrupt: Interrupt) -> FirstLimit | None:
    """Finds it for a candidate that needs the least number of replicas; otherwise, or on Ctrl-C, None."""
    if state.num_up is None or state.num_up != state.candidate.least_up or interrupt.noted:
        return None
    probe = replace(search.probe(state, state.num_up), seeds=search.seeds[:1])
    most = search.question.settings.max_requests
    task = GrowthTask(name=f"{state.candidate.name}, more traffic", probe=probe, max_requests=most)
    for _, (load, failing) in in_turn(GrowthTask.run, [task], 1, interrupt):
        if failing is not None and keeps(failing, search.question.slo):
            assert failing.lack is not None
            return FirstLimit(load=load, limit=None, lack=failing.lack.reason)
        return FirstLimit(load=load, limit=None if failing is None else limit_of_run(failing, state))
    return None
