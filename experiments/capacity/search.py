"""Best-first search for the cheapest candidates that meet the SLO.

Every candidate has a lower bound of its cost: its price times the fewest replicas that no bound and no run
has ruled out. The search always continues with the candidate whose bound is lowest, first with its analytic
bounds, then with runs, until the ranking cannot change. A candidate that costs more than the last ranked one
is therefore never simulated. Candidates of equal cost are searched in the order of the lists. All candidates
serve the same requests (common random numbers).

Runs of one candidate with different seeds are tasks of their own. A free process takes the remaining seeds
of the cheapest candidate that met the SLO with the first seed, otherwise the first seed or the bounds of the
next candidate. In the end the search forgets what it found ahead of time about candidates that cannot be
ranked, so its answer does not depend on the number of processes or on their speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

from experiments.capacity.candidates import Candidate, Question
from experiments.capacity.probe import Probe, Run, demand_of, keeps, sessions_of
from experiments.capacity.settings import CapacitySettings
from experiments.study.workers import Report, in_turn
from sim.engine.clock import Interrupt
from sim.setup.replica_bounds import bounds
from sim.setup.scenario import Scenario


class Status(Enum):
    """Outcome of a candidate."""

    found = "found"
    beyond = "more replicas than capacity.max_replicas"
    ruled_out = "ruled out by a bound"
    costlier = "simulated, costs at least as much as the last ranked one"
    never_reached = "not simulated, costs at least as much as the last ranked one"
    open = "not searched"
    """Not proposed by Optuna, or not reached before Ctrl-C."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceiling:
    """Analytic bounds of a candidate, with the seed and load of its first run."""

    share: float
    """Upper bound of the share of requests within the SLO, with any number of replicas."""
    term_shares: dict[str, float]
    """Term -> upper bound of the share of requests within its limit."""
    term_limits_s: dict[str, float]
    """Term -> lower bound of the limit that the target's share of the requests meets, in seconds."""
    replicas: dict[str, int]
    """Resource -> lower bound of the number of replicas."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CeilingTask:
    """Task that computes the bounds of a candidate."""

    name: str
    scenario: Scenario
    settings: CapacitySettings
    load: float
    seed: int

    def run(self) -> Ceiling:
        scenario, slo = self.scenario, self.scenario.slo
        assert slo is not None
        if sessions_of(scenario) is not None:  # lengths and times of later requests are not known in advance
            return Ceiling(share=1.0, term_shares={}, term_limits_s={}, replicas={"tokens": 1})
        found = bounds(scenario, demand_of(scenario, self.settings, self.seed), slo, self.load)
        return Ceiling(
            share=found.idle.share(slo),
            term_shares=found.idle.shares(slo),
            term_limits_s={
                term: found.idle.limit_s(term, slo.attainment_target) for term in slo.request_limits_s
            },
            replicas=found.replicas,
        )


class Look(Protocol):
    """Task of the search: the bounds of a candidate, or runs with a number of replicas."""

    @property
    def name(self) -> str: ...

    def run(self) -> Ceiling | list[Run]: ...


@dataclass(slots=True)
class Bracket:
    """Numbers of replicas: `fails` is the largest known to be too few, `keeps` the smallest known to suffice.

    The number grows from the lower bound in steps of 1, 2, 4, ... until it meets the SLO, and is then
    bisected. The result is exact if more replicas never do worse, which is assumed. `keeps` is None while no
    number is known to suffice; `most` is the largest number to try.
    """

    fails: int
    most: int
    keeps: int | None = None
    _step: int = 0

    def next(self) -> int | None:
        """Returns the number to try next; None if it is found or more than `most` are needed."""
        if self.is_found or self.is_beyond:
            return None
        if self.keeps is not None:
            return (self.fails + self.keeps) // 2
        return min(self.fails + max(1, self._step), self.most)

    def learn(self, number: int, kept: bool) -> None:
        """Records whether a number of replicas meets the SLO."""
        if kept:
            self.keeps = number if self.keeps is None else min(number, self.keeps)
        else:
            self.fails = max(number, self.fails)
            self._step = max(1, 2 * self._step)

    @property
    def least(self) -> int:
        """Lower bound of the number of replicas."""
        return self.fails + 1

    @property
    def is_found(self) -> bool:
        return self.keeps is not None and self.keeps == self.fails + 1

    @property
    def is_beyond(self) -> bool:
        return self.keeps is None and self.fails >= self.most


@dataclass(slots=True)
class State:
    """Candidate with its bounds and runs so far."""

    candidate: Candidate
    index: int
    """Place of the candidate in the order of the lists."""
    bracket: Bracket
    target: float
    ceiling: Ceiling | None = None
    """Its bounds; None if they were not computed yet."""
    runs: dict[int, list[Run]] = field(default_factory=dict)
    """Running replicas -> runs."""
    trying: dict[int, Run | None] = field(default_factory=dict)
    """Seed -> run with the number of replicas that is tried at present; None while it is simulated."""
    is_running: bool = False
    """Whether its bounds are being computed, or Optuna has all of it searched."""

    @property
    def is_ruled_out(self) -> bool:
        """True if a bound shows, before any run, that the candidate cannot meet the SLO."""
        if self.ceiling is None:
            return False
        return self.ceiling.share < self.target or (not self.runs and self.bracket.is_beyond)

    @property
    def is_settled(self) -> bool:
        """True if no further run is needed."""
        return self.is_ruled_out or self.bracket.is_found or self.bracket.is_beyond

    @property
    def num_up(self) -> int | None:
        """Smallest number of replicas that meets the SLO; None if it is not known."""
        return self.bracket.keeps if self.bracket.is_found else None

    def bound(self, ceiling: Ceiling) -> None:
        """Records the bounds."""
        self.ceiling = ceiling
        least = max(ceiling.replicas.values())
        self.bracket.fails = min(max(self.bracket.fails, least - 1), self.bracket.most)

    def learn(self, number: int, runs: list[Run], num_seeds: int, question: Question) -> None:
        """Records the runs with a number of replicas; the SLO is met if it is met in every seed."""
        self.runs[number] = runs
        kept = len(runs) == num_seeds and all(keeps(one, question.slo) for one in runs)
        self.bracket.learn(number, kept)

    def next_seed(self, seeds: Sequence[int], question: Question) -> int | None:
        """Returns the seed to simulate next; None if the seeds under way decide first.

        The others wait for the first seed: with most numbers that are too small it misses the SLO already.
        """
        runs = self.trying.values()
        if any(run is not None and not keeps(run, question.slo) for run in runs) or (
            self.trying and self.trying[seeds[0]] is None
        ):
            return None
        return next((seed for seed in seeds if seed not in self.trying), None)

    def learn_seed(self, number: int, seed: int, run: Run, seeds: Sequence[int], question: Question) -> None:
        """Learns from one run. A decided number keeps its runs up to the first that misses the SLO."""
        if number != self.bracket.next():
            return  # another seed has decided it
        self.trying[seed] = run
        runs: list[Run] = []
        for each in seeds:
            found = self.trying.get(each)
            if found is None:
                return
            runs.append(found)
            if not keeps(found, question.slo):
                break
        self.trying = {}
        self.learn(number, runs, len(seeds), question)


@dataclass(slots=True)
class Search:
    """Search among all candidates at one load."""

    question: Question
    load: float
    seeds: tuple[int, ...]
    states: list[State]
    interrupted: bool = False

    def least_cost(self, state: State) -> float:
        """Returns a lower bound of the candidate's cost, in USD per hour."""
        # If even the most replicas are not enough, they are the bound: for more, spares may be undefined.
        num_up = max(1, min(state.bracket.least, state.bracket.most))
        number = state.candidate.deployed(num_up, self.question.settings)
        return state.candidate.usd_per_hour * number

    def replicas(self, state: State) -> int:
        """Returns the replicas to rent of a candidate that was found, spares included."""
        assert state.num_up is not None
        return state.candidate.deployed(state.num_up, self.question.settings)

    def ranked(self) -> list[State]:
        """Returns the candidates found, cheapest first.

        At equal cost, those with the checkpoint's own number formats are first, whose outputs are the
        model's, then those with a higher SLO attainment.
        """

        def share(state: State) -> float:
            runs = state.runs[state.num_up or 0]
            return sum(run.share for run in runs) / len(runs)

        found = [state for state in self.states if state.num_up is not None]
        # Which candidates of equal cost enter the ranking must not depend on which run ends first.
        found = sorted(found, key=self.place)
        top = self.question.settings.top
        best = sorted(
            found[:top],
            key=lambda state: (self.least_cost(state), sets_formats(state), -share(state), state.index),
        )
        return best + found[top:]

    def place(self, state: State) -> tuple[float, bool, int]:
        """Returns the sort key by which candidates are searched: cost, other number formats, lists."""
        return self.least_cost(state), sets_formats(state), state.index

    def last_place(self) -> tuple[float, bool, int]:
        """Returns the sort key of the last ranked candidate; no candidate after it can enter the ranking."""
        top = self.question.settings.top
        places = sorted(self.place(state) for state in self.states if state.num_up is not None)
        return places[top - 1] if len(places) >= top else (float("inf"), True, 0)

    def status(self, state: State) -> Status:
        if state.num_up is not None:
            return Status.found
        if state.is_ruled_out:
            return Status.ruled_out
        if state.bracket.is_beyond:
            return Status.beyond
        if self.place(state) > self.last_place():
            return Status.costlier if state.runs else Status.never_reached
        return Status.open

    def next_look(self) -> tuple[State, Look] | None:
        """Returns the next task, of the cheapest candidate that has one; None if all tasks are under way."""
        last = self.last_place()
        left = [s for s in self.states if not s.is_settled and not s.is_running and self.place(s) < last]
        looks = ((state, self.look(state)) for state in sorted(left, key=self.place))
        return next(((state, look) for state, look in looks if look is not None), None)

    def look(self, state: State) -> Look | None:
        """Returns the next task of a candidate and notes it: its bounds, later a run with one seed."""
        if state.ceiling is None:
            state.is_running = True
            return self.ceiling_task(state)
        number, seed = state.bracket.next(), state.next_seed(self.seeds, self.question)
        assert number is not None
        if seed is None:
            return None
        state.trying[seed] = None
        return replace(self.probe(state, number), seeds=(seed,))

    def ceiling_task(self, state: State) -> CeilingTask:
        settings = self.question.settings
        return CeilingTask(
            name=state.candidate.name,
            scenario=state.candidate.scenario,
            settings=settings,
            load=self.load * (1 + settings.headroom),
            seed=self.seeds[0],
        )

    def probe(self, state: State, number: int) -> Probe:
        settings = self.question.settings
        return Probe(
            name=f"{state.candidate.name}, {number} replica{'s' * (number != 1)}",
            scenario=state.candidate.scenario,
            replicas=number,
            load=self.load * (1 + settings.headroom),
            seeds=self.seeds,
            window_s=settings.window_s,
            is_trace=len(self.seeds) < len(settings.seeds),
        )

    def exhaust(self, interrupt: Interrupt, report: Report) -> None:
        """Searches until the ranking is known, or until Ctrl-C."""
        asked: list[tuple[State, Look]] = []
        nothing_known = [replace(s, bracket=replace(s.bracket), runs={**s.runs}) for s in self.states]

        def tasks() -> Iterator[Look | None]:
            while True:
                found = self.next_look()
                if found is not None:
                    asked.append(found)
                yield None if found is None else found[1]

        outcomes = in_turn(_run, tasks(), self.question.settings.runs_on, interrupt)
        for index, found in outcomes:
            state, task = asked[index]
            if isinstance(found, Ceiling):
                state.is_running = False
                state.bound(found)
            else:
                assert isinstance(task, Probe)
                state.learn_seed(task.replicas, task.seeds[0], found[0], self.seeds, self.question)
            last = self.last_place()
            num_done = sum(s.is_settled or self.place(s) > last for s in self.states)
            report(num_done, len(self.states))
            if num_done == len(self.states):
                break  # runs that are still under way cannot change the ranking
        outcomes.close()
        self.interrupted = interrupt.noted
        if not interrupt.noted:
            for state, known in zip(nothing_known, self.states, strict=True):
                self._recall(state, known)
            self.states = nothing_known

    def _recall(self, state: State, known: State) -> None:
        """Lets a state learn from `known` as far as a search in a single process would have gone."""
        last = self.last_place()
        while not state.is_settled and self.place(state) <= last:
            if state.ceiling is None:
                assert known.ceiling is not None
                state.bound(known.ceiling)
            else:
                number = state.bracket.next()
                assert number is not None
                state.learn(number, known.runs[number], len(self.seeds), self.question)

    def bound_all(self, interrupt: Interrupt) -> None:
        """Computes the bounds of all candidates, for a search that is not ordered by cost."""
        tasks = [self.ceiling_task(state) for state in self.states]
        launcher = self.question.settings.runs_on
        for index, ceiling in in_turn(CeilingTask.run, tasks, launcher, interrupt):
            self.states[index].bound(ceiling)
        self.interrupted = interrupt.noted


def sets_formats(state: State) -> bool:
    """Returns whether number formats were set for a candidate, in place of those of its checkpoint."""
    return any(value is not None for value in state.candidate.asked.values())


def _run(task: Look) -> Ceiling | list[Run]:
    return task.run()


def begin(question: Question, load: float, seeds: tuple[int, ...], earlier: Sequence[State] = ()) -> Search:
    """Starts a search; earlier: states at a smaller load, whose failing numbers of replicas fail too."""
    settings = question.settings
    fails = {state.candidate.name: state.bracket.fails for state in earlier}
    states = [
        State(
            candidate=candidate,
            index=index,
            bracket=_bracket(candidate, fails.get(candidate.name, 0), settings),
            target=question.slo.attainment_target,
        )
        for index, candidate in enumerate(question.candidates)
    ]
    return Search(question=question, load=load, seeds=seeds, states=states)


def _bracket(candidate: Candidate, fails: int, settings: CapacitySettings) -> Bracket:
    most = candidate.most_up(settings)
    return Bracket(fails=min(max(fails, candidate.least_up - 1), most), most=most)
