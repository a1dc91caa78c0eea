"""The search for the cheapest fleet: it finds what trying all would find, in few runs."""

import math
import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.app.settings.variants import Variants
from experiments.capacity.advice import closest
from experiments.capacity.candidates import build_candidates
from experiments.capacity.probe import Run, distinct_seeds, keeps, reseeded
from experiments.capacity.search import Bracket, Ceiling, Search, State, Status
from experiments.capacity.settings import CapacitySettings
from sim.engine.clock import Interrupt
from tests.experiments.capacity.questions import SCENARIO, SLO, SMALL, run_with


class Fleet(SimpleNamespace):
    """A candidate that needs a given number of replicas, whatever is simulated."""

    def deployed(self, num_up, settings):
        return num_up + settings.spare


def toy_search(fleets, top, monkeypatch, spare=0):
    """Searches toy fleets, each given as (price, replicas needed, bound on the replicas)."""
    asked = CapacitySettings(top=top, jobs=1, spare=spare, max_replicas=40)
    question = SimpleNamespace(settings=asked, slo=SLO)
    states, bounds = [], {}
    for i, (price, needed, bound) in enumerate(fleets):
        fleet = Fleet(asked={}, name=f"{i:03}", usd_per_hour=price, needed=needed, scenario=SCENARIO.scenario)
        bracket = Bracket(fails=0, most=40 - spare)
        states.append(State(candidate=fleet, index=i, bracket=bracket, target=0.9))
        bounds[fleet.name] = bound
    search = Search(question=question, load=1.0, seeds=asked.seeds, states=states)
    runs = []

    def run(probe):
        fleet = next(s.candidate for s in states if probe.name.startswith(f"{s.candidate.name},"))
        runs.append((fleet.name, probe.replicas))
        missing = fleet.needed - probe.replicas
        shares = (1.0, 1.0, 1.0) if missing <= 0 else (0.95, 0.5, 0.8) if missing <= 2 else (0.3, 0.5, 0.8)
        return [run_with(shares[seed]) for seed in probe.seeds]

    def bound(task):
        return Ceiling(share=1.0, term_shares={}, term_limits_s={}, replicas={"tokens": bounds[task.name]})

    monkeypatch.setattr("experiments.capacity.search.Probe.run", run)
    monkeypatch.setattr("experiments.capacity.search.CeilingTask.run", bound)
    search.exhaust(Interrupt(), lambda done, total: None)
    return search, runs


@given(st.integers(1, 60), st.integers(1, 60), st.integers(60, 64))
def test_bisection_finds_the_least_number_in_few_tries(needed, bound, most):
    bound, tries = min(bound, needed), []
    bracket = Bracket(fails=bound - 1, most=most)
    while (number := bracket.next()) is not None:
        tries.append(number)
        bracket.learn(number, number >= needed)
    assert bracket.is_found
    assert bracket.keeps == needed
    assert len(tries) == len(set(tries)) <= 2 + 2 * math.ceil(math.log2(needed - bound + 2))
    assert tries[0] == bound  # so that a bound that is exact costs one try


def test_a_search_that_would_need_more_than_allowed_says_so():
    bracket = Bracket(fails=0, most=6)
    while (number := bracket.next()) is not None:
        bracket.learn(number, False)
    assert (bracket.is_beyond, bracket.fails, bracket.keeps) == (True, 6, None)


prices = st.lists(
    st.tuples(st.sampled_from([1.0, 1.5, 2.7, 4.0, 10.0]), st.integers(1, 50), st.integers(0, 12)),
    min_size=1,
    max_size=15,
)


def known_of(search):
    return [(s.ceiling, s.runs, s.bracket, search.status(s)) for s in search.states]


@given(prices, st.integers(1, 4), st.integers(2, 5), st.randoms(use_true_random=False))
def test_what_is_found_does_not_depend_on_processes_and_their_pace(fleets, top, jobs, random):
    """Some numbers of replicas fail with the second seed of three only."""
    given_fleets = [(price, needed, max(1, needed - slack)) for price, needed, slack in fleets]

    def some_at_a_time(work, tasks, jobs_asked, interrupt):
        running, index = {}, 0
        while True:
            while len(running) < jobs and (task := next(tasks)) is not None:
                running[index], index = task, index + 1
            if not running:
                return
            done = random.choice(sorted(running))
            yield done, work(running.pop(done))

    with pytest.MonkeyPatch.context() as monkeypatch:
        in_turn, runs = toy_search(given_fleets, top, monkeypatch)
        assert len(runs) == sum(len(found) for s in in_turn.states for found in s.runs.values())
        monkeypatch.setattr("experiments.capacity.search.in_turn", some_at_a_time)
        found, _ = toy_search(given_fleets, top, monkeypatch)
    assert known_of(found) == known_of(in_turn)


@given(prices, st.integers(1, 4), st.integers(0, 2))
def test_the_ranking_is_that_of_all_candidates_and_no_run_costs_more(fleets, top, spare):
    given_fleets = [(price, needed, max(1, needed - slack)) for price, needed, slack in fleets]
    with pytest.MonkeyPatch.context() as monkeypatch:
        search, runs = toy_search(given_fleets, top, monkeypatch, spare)
    costs = sorted(
        (price * (needed + spare), f"{i:03}")
        for i, (price, needed, _) in enumerate(given_fleets)
        if needed + spare <= 40
    )
    found = [(search.least_cost(s), s.candidate.name) for s in search.ranked()]
    assert found[:top] == costs[:top]
    if len(costs) >= top:
        last = costs[top - 1][0]
        least = {f"{i:03}": price * (bound + spare) for i, (price, _, bound) in enumerate(given_fleets)}
        assert all(least[name] <= last for name, _ in runs)
    assert {search.status(s) for s in search.states} <= {*Status} - {Status.open}


def test_every_seed_must_keep_the_slo():
    state = State(
        candidate=None,
        index=0,
        bracket=Bracket(fails=0, most=9),
        target=0.9,
    )
    question = SimpleNamespace(slo=SLO)
    state.learn(1, [run_with(0.95), run_with(0.89)], 2, question)
    assert (state.bracket.fails, state.bracket.keeps) == (1, None)
    state.learn(2, [run_with(0.95)], 2, question)  # the second was never run
    assert state.bracket.keeps is None
    state.learn(3, [run_with(0.95), run_with(0.9)], 2, question)
    assert state.bracket.keeps == 3
    assert not keeps(run_with(0.95, cut=True), SLO)


def test_seeds_that_change_nothing_are_run_once(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,10,5\n1,20,5\n3,10,9\n")
    overrides = ["workload=plain_csv", f"workload.path={trace}", "~workload.num_requests"]
    base = [o for o in SMALL if not o.startswith("workload")] + overrides[:2]
    variants = Variants(ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]), base)
    trace_only = build_candidates(CapacitySettings(), variants)[0][0].scenario
    drawn = build_candidates(CapacitySettings(more=(("routing=random",),)), variants)[0][0].scenario
    assert distinct_seeds([trace_only], CapacitySettings()) == (0,)
    assert distinct_seeds([drawn], CapacitySettings()) == (0, 1, 2)
    assert distinct_seeds([trace_only, drawn], CapacitySettings()) == (0, 1, 2)
    assert distinct_seeds([SCENARIO.scenario], CapacitySettings()) == (0, 1, 2)
    assert reseeded(drawn, 2).routing.seed == 2
    assert reseeded(replace(drawn, routing=replace(drawn.routing, seed=7)), 2).routing.seed == 7


def test_the_closest_is_found_by_runs_to_the_end_not_by_bounds(monkeypatch):
    true_shares = {"idle": 0.2, "cut": 0.7, "worse": 0.6}
    states = []
    for i, (name, ceiling) in enumerate({"idle": 0.89, "cut": 1.0, "worse": 1.0}.items()):
        fleet = Fleet(name=name, usd_per_hour=1.0, least_up=1, scenario=SCENARIO.scenario)
        state = State(candidate=fleet, index=i, bracket=Bracket(fails=0, most=4), target=0.9)
        state.ceiling = Ceiling(share=ceiling, term_shares={}, term_limits_s={}, replicas={"tokens": 1})
        states.append(state)
    for state in states[1:]:
        state.runs[4] = [run_with(0.88 if state.index == 1 else 0.885, cut=True)]
    question = SimpleNamespace(settings=CapacitySettings(jobs=1), slo=SLO)
    search = Search(question=question, load=1.0, seeds=(0,), states=states)

    def run(probe):
        assert not probe.stop
        return [run_with(true_shares[probe.name.split(",")[0]])]

    monkeypatch.setattr("experiments.capacity.advice.Probe.run", run)
    best, probe, runs = closest(search, Interrupt())
    assert (best.candidate.name, probe.replicas, runs[0].share) == ("cut", 4, 0.7)


def test_a_run_passes_from_a_worker_process():
    """Answers of workers are pickled; a trace's intervals are empty for all other workloads."""
    assert pickle.loads(pickle.dumps(Run._field_defaults)) == Run._field_defaults  # nosec B301 (own data)
