"""Placements: exact ones against brute force and greedy ones; nothing overfull; the textbook case."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.placement import Demand, Hosting, Objective, Plan, Pool, Problem
from policies.placement.greedy import BestFitDecreasing, DensestFirst, FirstFitDecreasing
from policies.placement.milp import Milp, plan_of, units_of
from tests.examples import examples

GREEDY = [FirstFitDecreasing(), BestFitDecreasing(), DensestFirst()]
EVERY = [Milp(), *GREEDY]


def flat(rate):
    return lambda num_bytes: rate


@st.composite
def problems(draw, objective=Objective.value, largest=2):
    """Draws two or three models on two kinds of GPUs; memory is whole numbers, so exact fits are common."""
    names = ["a", "b", "c"][: draw(st.integers(2, 3))]
    pools = tuple(
        Pool(
            name=name,
            count=draw(st.integers(0 if name == "y" else 1, largest)),
            memory_bytes=draw(st.integers(4, 12)),
            usd_per_hour=draw(st.sampled_from([1.0, 1.5, 4.0])),
            gpus_per_node=draw(st.sampled_from([1, 2, 4])),
            switch_share=draw(st.sampled_from([0.0, 0.1])),
        )
        for name in ("x", "y")
    )
    hostings = []
    for model, pool in product(names, pools):
        size, rate = draw(st.integers(1, 14)), draw(st.integers(1, 10))
        for gpus in (1, 2):
            share = -(-size // gpus)
            if share <= pool.memory_bytes:
                gain = draw(st.floats(0, 0.1))
                hostings.append(
                    Hosting(
                        model=model,
                        pool=pool.name,
                        num_gpus=gpus,
                        bytes_each=share,
                        rate=lambda b, r=rate * gpus**0.8, g=gain, s=share: r * (1 + g * (b - s)),
                    )
                )
    rates = st.integers(1, 6) if objective is Objective.cost else st.none() | st.integers(1, 12)
    demands = tuple(
        Demand(model=model, rate=draw(rates), value=draw(st.sampled_from([0.5, 1.0, 3.0]))) for model in names
    )
    hosted = {hosting.model for hosting in hostings}
    if objective is Objective.cost:
        demands = tuple(demand for demand in demands if demand.model in hosted) or demands[:1]
        if not hosted:
            hostings.append(Hosting(model="a", pool="x", bytes_each=1, rate=flat(1.0)))
    return Problem(
        pools=pools,
        demands=demands,
        hostings=tuple(h for h in hostings if h.model in {d.model for d in demands}),
        objective=objective,
        max_models_per_gpu=draw(st.integers(1, 3)),
        time_shared=draw(st.booleans()),
    )


def brute_force(problem) -> Plan | None:
    """Tries every multiset of units that the nodes hold, and returns the best plan."""
    units = units_of(problem)
    best = None
    for counts in held(problem, units):
        plan = plan_of(problem, [unit for unit, n in zip(units, counts, strict=True) for _ in range(n)])
        if problem.objective is Objective.value:
            better = best is None or plan.value > best.value
        else:
            better = plan.met and (best is None or plan.usd_per_hour < best.usd_per_hour)
        best = plan if better else best
    return best


def held(problem, units, first=()):
    """Yields all counts of units that the nodes hold; `first`: those of the first units.

    Where these do not fit, neither they nor more of them fit together with others.
    """
    if len(first) == len(units):
        yield first
        return
    unit, rest = units[len(first)], (0,) * (len(units) - len(first) - 1)
    for count in range(problem.pool(unit.pool).count // unit.num_gpus + 1):
        if not holds(problem, units, (*first, count, *rest)):
            return
        yield from held(problem, units, (*first, count))


def holds(problem, units, counts):
    """Tests whether groups of GPUs fit side by side into nodes, by trying the largest first."""
    listed = [unit for unit, count in zip(units, counts, strict=True) for _ in range(count)]
    return all(packs(pool, [u.num_gpus for u in listed if u.pool == pool.name]) for pool in problem.pools)


def packs(pool, sizes):
    nodes = list(pool.nodes)
    for size in sorted(sizes, reverse=True):
        room = next((i for i, left in enumerate(nodes) if left >= size), None)
        if room is None:
            return False
        nodes[room] -= size
    return True


def check_sound(problem, plan):
    """Checks that no GPU is overfull, no node split, and neither GPUs nor their time given out twice."""
    needs = {(h.model, h.pool, h.num_gpus): h for h in problem.hostings}
    for unit, count in plan.units:
        pool = problem.pool(unit.pool)
        assert count >= 1
        assert unit.num_gpus <= pool.gpus_per_node
        held = sum(needs[model, unit.pool, unit.num_gpus].bytes_each for model in unit.models)
        assert held <= pool.memory_bytes
        assert len(unit.models) <= (problem.max_models_per_gpu if unit.num_gpus == 1 else 1)
    assert all(used <= problem.pool(name).count for name, used in plan.gpus.items())
    units, counts = zip(*plan.units, strict=True) if plan.units else ((), ())
    assert holds(problem, units, counts)
    for demand in problem.demands:
        assert 0 <= plan.served[demand.model] <= (demand.rate or float("inf")) * (1 + 1e-6)
    most = sum(
        count * sum(unit.rates) * (1 if not problem.time_shared else unit.time_share)
        for unit, count in plan.units
    )
    assert sum(plan.served.values()) <= most * (1 + 1e-6) + 1e-9


@examples(10, 40)
@given(problems())
def test_the_program_is_worth_as_much_as_brute_force(problem):
    exact = Milp().place(problem)
    check_sound(problem, exact)
    assert exact.value == pytest.approx(brute_force(problem).value, rel=1e-6, abs=1e-9)


@examples(20, 40)
@given(problems(Objective.cost))
def test_the_program_rents_as_little_as_brute_force(problem):
    best = brute_force(problem)
    if best is None:
        with pytest.raises(ValueError, match="no placement serves"):
            Milp().place(problem)
        return
    exact = Milp().place(problem)
    check_sound(problem, exact)
    assert exact.met
    assert exact.usd_per_hour == pytest.approx(best.usd_per_hour)


@examples(20, 60)
@given(problems(largest=4), st.sampled_from(GREEDY))
def test_greedy_placements_are_sound_and_never_worth_more(problem, greedy):
    plan = greedy.place(problem)
    check_sound(problem, plan)
    assert plan.value <= Milp().place(problem).value * (1 + 1e-6) + 1e-9


@examples(20, 60)
@given(problems(Objective.cost, largest=4), st.sampled_from(GREEDY))
def test_greedy_placements_that_meet_the_demand_are_never_cheaper(problem, greedy):
    try:
        plan = greedy.place(problem)
    except ValueError:  # it leaves demand unmet
        return
    check_sound(problem, plan)
    assert plan.met
    assert Milp().place(problem).usd_per_hour <= plan.usd_per_hour * (1 + 1e-9)


# By hand


SIZES = {"8b": 8, "13b": 13, "34b": 34, "70b": 70}


def textbook(models=tuple(SIZES), **gpus):
    """Models of 8 bits a weight, GPUs by the gigabyte, a replica worth its billions of parameters."""
    pools = tuple(
        Pool(name=name, count=1, memory_bytes=size, usd_per_hour=1.0) for name, size in gpus.items()
    )
    return Problem(
        pools=pools,
        demands=tuple(Demand(model=model, value=SIZES[model]) for model in models),
        hostings=tuple(
            Hosting(model=model, pool=pool.name, bytes_each=SIZES[model], rate=flat(1.0))
            for model in models
            for pool in pools
        ),
        max_models_per_gpu=10,
        time_shared=False,
    )


def test_by_memory_alone_three_13b_beat_one_34b_on_40_gb():
    """39 of 40 GB are used, in place of 34; five of 8 B fill it."""
    (only,) = Milp().place(textbook(models=("13b", "34b"), small=40)).units
    assert only[0].models == ("13b",) * 3
    (only,) = Milp().place(textbook(small=40)).units
    assert only[0].models == ("8b",) * 5


def test_the_textbook_fleet_by_memory_alone():
    """24: 8 + 8 + 8 = 24. 40: 5 x 8 = 40. 48: 6 x 8 = 48, 34 + 13 only 47. 80: 10 x 8, or 34 + 34 only 68."""
    plan = Milp().place(textbook(a=24, b=40, c=48, d=80))
    assert plan.value == 24 + 40 + 48 + 80
    assert FirstFitDecreasing().place(textbook(a=24, b=40, c=48, d=80)).value < plan.value


def test_one_replica_of_each_in_the_textbook_fleet():
    """Each is asked for once. 34 + 13 fit 48, 70 + 8 fit 80: two GPUs are enough, by weights alone."""
    problem = textbook(a=24, b=40, c=48, d=80)
    asked = Problem(
        pools=problem.pools,
        demands=tuple(Demand(model=d.model, value=d.value, rate=1) for d in problem.demands),
        hostings=problem.hostings,
        max_models_per_gpu=10,
        time_shared=False,
    )
    plan = Milp().place(asked)
    assert plan.replicas == {"8b": 1, "13b": 1, "34b": 1, "70b": 1}
    assert plan.met
    assert {unit.pool: unit.models for unit, _ in plan.units} == {"c": ("13b", "34b"), "d": ("70b", "8b")}
    assert plan.usd_per_hour == 2


def shared(rate_34b, switch_share=0.0, **changes):
    """Returns three models of 13 B and one of 34 B that share 40 GB by time slices."""
    pool = Pool(name="gpu", count=1, memory_bytes=40, switch_share=switch_share)
    rates = {"13b-1": 30.0, "13b-2": 30.0, "13b-3": 30.0, "34b": rate_34b}
    sizes = {"13b-1": 13, "13b-2": 13, "13b-3": 13, "34b": 34}
    return Problem(
        pools=(pool,),
        demands=tuple(Demand(model=model, **changes) for model in rates),
        hostings=tuple(
            Hosting(model=model, pool="gpu", bytes_each=sizes[model], rate=flat(rate))
            for model, rate in rates.items()
        ),
        max_models_per_gpu=3,
    )


def test_time_sliced_replicas_serve_no_more_than_one_less_the_switches():
    """30 tokens/s whichever model runs; with switches a GPU is better left to one model if traffic allows."""
    assert Milp().place(shared(12.0)).value == pytest.approx(30)
    alone = Milp().place(shared(12.0, switch_share=0.1))
    assert alone.value == pytest.approx(30)
    assert sum(alone.replicas.values()) == 1


def test_limited_demand_makes_models_share():
    """10 tokens/s are asked for of each. Three 13 B models serve all of theirs, 90 % of 30 with switches."""
    plan = Milp().place(shared(12.0, switch_share=0.1, rate=10))
    assert plan.value == pytest.approx(27)
    assert plan.replicas == {"13b-1": 1, "13b-2": 1, "13b-3": 1}
    assert Milp().place(shared(40.0, switch_share=0.1, rate=28)).replicas != plan.replicas


def test_a_model_too_large_for_one_gpu_gets_two_of_one_node():
    """Three nodes of one GPU hold no pair; a node of three holds one, and a small model beside it."""
    hostings = (
        Hosting(model="large", pool="x", num_gpus=2, bytes_each=9, rate=flat(5.0)),
        Hosting(model="small", pool="x", bytes_each=9, rate=flat(1.0)),
    )
    demands = (Demand(model="large"), Demand(model="small"))
    for count, per_node, value in ((3, 1, 3.0), (3, 3, 6.0), (6, 3, 12.0), (6, 6, 15.0), (4, 3, 7.0)):
        pool = Pool(name="x", count=count, memory_bytes=10, gpus_per_node=per_node)
        assert Milp().place(Problem(pools=(pool,), demands=demands, hostings=hostings)).value == value


def test_what_memory_is_left_makes_replicas_faster():
    """A rate that grows with memory: one replica alone serves more than two that share."""
    hosting = Hosting(model="a", pool="x", bytes_each=4, rate=lambda num_bytes: num_bytes)
    problem = Problem(
        pools=(Pool(name="x", count=1, memory_bytes=10),),
        demands=(Demand(model="a"),),
        hostings=(hosting,),
        max_models_per_gpu=2,
    )
    assert Milp().place(problem).value == 10


def test_replicas_share_what_memory_is_left():
    """10 bytes, two models that need 2 and 4 at least: each gets 2 of the 4 that are left."""
    hostings = tuple(
        Hosting(model=model, pool="x", bytes_each=size, rate=lambda num_bytes: num_bytes)
        for model, size in (("a", 2), ("b", 4))
    )
    problem = Problem(
        pools=(Pool(name="x", count=1, memory_bytes=10),),
        demands=(Demand(model="a"), Demand(model="b")),
        hostings=hostings,
        max_models_per_gpu=2,
    )
    rates = {unit.models: unit.rates for unit in units_of(problem)}
    assert rates[("a", "b")] == (4, 6)
    assert rates[("a",)] == (10,)


@pytest.mark.parametrize("policy", EVERY, ids=lambda policy: type(policy).__name__)
def test_no_policy_takes_a_gpu_that_serves_nothing_more(policy):
    problem = Problem(
        pools=(Pool(name="x", count=4, memory_bytes=10, usd_per_hour=2.0),),
        demands=(Demand(model="a", rate=5),),
        hostings=(Hosting(model="a", pool="x", bytes_each=6, rate=flat(10.0)),),
    )
    assert policy.place(problem).gpus == {"x": 1}


@pytest.mark.parametrize("policy", EVERY, ids=lambda policy: type(policy).__name__)
def test_every_policy_meets_an_easy_demand(policy):
    problem = Problem(
        pools=(Pool(name="x", count=4, memory_bytes=10, usd_per_hour=2.0),),
        demands=(Demand(model="a", rate=15),),
        hostings=(Hosting(model="a", pool="x", bytes_each=4, rate=flat(10.0)),),
        objective=Objective.cost,
    )
    plan = policy.place(problem)
    assert plan.served == {"a": pytest.approx(15)}
    assert plan.usd_per_hour == 4


# Bad input


def test_rejects_a_demand_beyond_all_gpus():
    problem = Problem(
        pools=(Pool(name="x", count=1, memory_bytes=10),),
        demands=(Demand(model="a", rate=15),),
        hostings=(Hosting(model="a", pool="x", bytes_each=4, rate=flat(10.0)),),
        objective=Objective.cost,
    )
    with pytest.raises(ValueError, match=r"no placement serves a 15 tokens/s on 1 x; allow more GPUs"):
        Milp().place(problem)
    with pytest.raises(ValueError, match=r"leaves demand unmet: a 10 of 15 tokens/s"):
        FirstFitDecreasing().place(problem)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pool(name="x", count=-1, memory_bytes=1), "count=-1: must be >= 0"),
        (
            lambda: Pool(name="x", count=1, memory_bytes=1, switch_share=1.0),
            r"switch_share=1.0: must be >= 0 and",
        ),
        (lambda: Demand(model="a", rate=-1), "rate=-1: must be a finite number >= 0, or null for no limit"),
        (lambda: Demand(model="a", value=-1), "value=-1: must be a finite number >= 0"),
        (
            lambda: Hosting(model="a", pool="x", num_gpus=3, bytes_each=1, rate=flat(1)),
            r"num_gpus=3: must be 1, 2",
        ),
        (lambda: Problem(pools=(), demands=(), hostings=()), r"gpus=\[\]: must have a GPU"),
    ],
)
def test_rejects_what_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_rejects_a_demand_for_a_model_that_fits_nowhere_and_one_without_a_number():
    pools = (Pool(name="x", count=1, memory_bytes=10),)
    with pytest.raises(ValueError, match=r"models\[0\].name=a: fits none of the GPUs"):
        Problem(pools=pools, demands=(Demand(model="a", rate=1),), hostings=(), objective=Objective.cost)
    with pytest.raises(
        ValueError, match=r"models\[0\].demand=null: objective=cost needs the demand for a in tokens"
    ):
        Problem(pools=pools, demands=(Demand(model="a"),), hostings=(), objective=Objective.cost)
