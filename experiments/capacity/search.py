"""The search: bounds first, then the cheapest that is still possible, until the ranking cannot change.

Every candidate has a least cost: its price times the fewest replicas that are not ruled out, by a bound or by
a run. The next run is always one of the candidate with the smallest, so no run is made of what costs more
than the candidates that are looked for. A candidate whose least cost exceeds that of the last place of the
ranking is never reached. Runs of a candidate all have the same requests (common random numbers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from experiments.capacity.brackets import Bracket
from experiments.capacity.candidates import Candidate, Question
from experiments.capacity.probe import Probe, Run, demand_of, keeps
from experiments.capacity.settings import CapacitySettings
from experiments.workers import Report, as_asked, in_turn
from sim.interrupt import Interrupt
from sim.replica_bounds import bounds
from sim.scenario import Scenario


class Status(Enum):
    """What became of a candidate."""

    found = "found"
    beyond = "more replicas than capacity.max_replicas"
    ruled_out = "ruled out by a bound"
    costlier = "simulated, costs more than the last place"
    never_reached = "never simulated, costs more than the last place"
    open = "not searched"
    """Optuna did not ask for it, or Ctrl-C came first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceiling:
    """What bounds say of a candidate, with the seed and load of the first run."""

    share: float
    """The most that is within the SLO, of all requests, with however many replicas."""
    term_shares: dict[str, float]
    term_limits_s: dict[str, float]
    """By term: no smaller limit is kept by the target's share of the requests."""
    replicas: dict[str, int]
    """By resource: fewer are not enough."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CeilingTask:
    """A task."""

    name: str
    scenario: Scenario
    settings: CapacitySettings
    load: float
    seed: int

    def run(self) -> Ceiling:
        scenario, slo = self.scenario, self.scenario.slo
        assert slo is not None
        found = bounds(scenario, demand_of(scenario, self.settings, self.seed), slo, self.load)
        return Ceiling(
            share=found.idle.share(slo),
            term_shares=found.idle.shares(slo),
            term_limits_s={
                term: found.idle.limit_s(term, slo.attainment_target) for term in slo.limits_s
            },
            replicas=found.replicas,
        )


@dataclass(slots=True)
class State:
    """A candidate, and what is known of it."""

    candidate: Candidate
    ceiling: Ceiling
    bracket: Bracket
    target: float
    runs: dict[int, list[Run]] = field(default_factory=dict)
    """By replicas that are up."""
    is_running: bool = False

    @property
    def is_ruled_out(self) -> bool:
        """By a bound, before any run."""
        return self.ceiling.share < self.target or (not self.runs and self.bracket.is_beyond)

    @property
    def is_settled(self) -> bool:
        """Whether no further run would tell more."""
        return self.is_ruled_out or self.bracket.is_found or self.bracket.is_beyond

    @property
    def num_up(self) -> int | None:
        """Replicas that keep the SLO; None: not known."""
        return self.bracket.keeps if self.bracket.is_found else None

    def learn(self, number: int, runs: list[Run], num_seeds: int, question: Question) -> None:
        """What a probe has shown: every seed must keep the SLO."""
        self.runs[number] = runs
        kept = len(runs) == num_seeds and all(keeps(one, question.slo) for one in runs)
        self.bracket.learn(number, kept)


@dataclass(slots=True)
class Search:
    """All candidates at one load."""

    question: Question
    load: float
    seeds: tuple[int, ...]
    states: list[State]
    interrupted: bool = False

    def least_cost(self, state: State) -> float:
        """USD an hour that the candidate costs at least."""
        number = state.candidate.deployed(state.bracket.least, self.question.settings)
        return state.candidate.usd_per_hour * number

    def ranked(self) -> list[State]:
        """Those found, the cheapest first; of equal ones, that with more requests within the SLO."""

        def key(state: State) -> tuple[float, float, str]:
            runs = state.runs[state.num_up or 0]
            return self.least_cost(state), -sum(run.share for run in runs) / len(runs), state.candidate.name

        return sorted((state for state in self.states if state.num_up is not None), key=key)

    def last_place_usd(self) -> float:
        """No candidate that costs more can enter the ranking."""
        top, costs = self.question.settings.top, sorted(self.least_cost(s) for s in self.ranked())
        return costs[top - 1] if len(costs) >= top else float("inf")

    def status(self, state: State) -> Status:
        if state.num_up is not None:
            return Status.found
        if state.is_ruled_out:
            return Status.ruled_out
        if state.bracket.is_beyond:
            return Status.beyond
        if self.least_cost(state) > self.last_place_usd():
            return Status.costlier if state.runs else Status.never_reached
        return Status.open

    def next_state(self) -> State | None:
        """The candidate to run next; None: no run is of use, or all such candidates are running."""
        left = [s for s in self.states if not s.is_settled]
        if not left:
            return None
        cost, state = min(((self.least_cost(s), i) for i, s in enumerate(left)), key=lambda pair: pair)
        waiting = [s for s in left if not s.is_running]
        if cost > self.last_place_usd() or not waiting:
            return None
        state_to_run = min(waiting, key=self.least_cost)
        return state_to_run if self.least_cost(state_to_run) <= self.last_place_usd() else None

    def probe(self, state: State, number: int) -> Probe:
        settings = self.question.settings
        return Probe(
            name=f"{state.candidate.name}, {number} replicas",
            scenario=state.candidate.scenario,
            replicas=number,
            load=self.load * (1 + settings.headroom),
            seeds=self.seeds,
            window_s=settings.window_s,
        )

    def exhaust(self, interrupt: Interrupt, report: Report) -> None:
        """Run until the ranking is known, or Ctrl-C."""
        asked: list[tuple[State, int]] = []

        def next_task() -> Probe | None:
            state = self.next_state()
            number = None if state is None else state.bracket.next()
            if state is None or number is None:
                return None
            state.is_running = True
            asked.append((state, number))
            return self.probe(state, number)

        jobs = self.question.settings.num_processes
        for index, runs in as_asked(Probe.run, next_task, jobs, interrupt):
            state, number = asked[index]
            state.is_running = False
            state.learn(number, runs, len(self.seeds), self.question)
            limit = self.last_place_usd()
            done = sum(s.is_settled or self.least_cost(s) > limit for s in self.states)
            report(done, len(self.states))
        self.interrupted = interrupt.noted


def begin(
    question: Question,
    load: float,
    seeds: tuple[int, ...],
    interrupt: Interrupt,
    earlier: Sequence[State] = (),
) -> Search | None:
    """All candidates with their bounds; earlier: states at a smaller load, where no fewer were enough.

    None if Ctrl-C came first.
    """
    settings = question.settings
    tasks = [
        CeilingTask(
            name=one.name,
            scenario=one.scenario,
            settings=settings,
            load=load * (1 + settings.headroom),
            seed=seeds[0],
        )
        for one in question.candidates
    ]
    found: dict[int, Ceiling] = dict(in_turn(CeilingTask.run, tasks, settings.num_processes, interrupt))
    if len(found) < len(tasks):
        return None
    known = {state.candidate.name: state.bracket.fails for state in earlier}
    states = []
    for i, candidate in enumerate(question.candidates):
        least = max(*found[i].replicas.values(), known.get(candidate.name, 0) + 1)
        most = settings.max_replicas - settings.spare
        states.append(
            State(
                candidate=candidate,
                ceiling=found[i],
                bracket=Bracket(fails=min(least - 1, most), most=most),
                target=question.slo.attainment_target,
            )
        )
    return Search(question=question, load=load, seeds=seeds, states=states)
