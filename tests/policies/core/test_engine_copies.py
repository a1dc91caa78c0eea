"""Engines that are built from one policy object share none of its memory, and leave the object as it was."""

import pytest

from policies.core.plan import StepOutcome
from policies.scheduling.mlfq import Mlfq
from policies.scheduling.virtual_token_counter import VirtualTokenCounter

POLICIES = {
    "mlfq": lambda: Mlfq(quantum_tokens=2, num_levels=3),
    "virtual token counter": VirtualTokenCounter,
}


def feed(core, make_request, num, tenants):
    for i in range(num):
        core.add(make_request(i, 3 + i % 4, tenant=tenants[i % len(tenants)], max_tokens=4 + 3 * i))


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_two_engines_of_one_policy_object_serve_as_if_alone(policy, make_core, make_request, run_out):
    def alone(scheduling, num):
        core = make_core(scheduling=scheduling, max_num_seqs=2)
        feed(core, make_request, num, "ab")
        return run_out(core)

    expected, given = alone(policy(), 7), policy()
    busy, watched = (make_core(scheduling=given, max_num_seqs=2) for _ in range(2))
    feed(busy, make_request, 5, "b")
    for _ in range(4):
        busy.commit(busy.plan(0.0), StepOutcome(), 0.0)
    feed(watched, make_request, 7, "ab")
    assert run_out(watched) == expected
    run_out(busy)
    assert alone(given, 7) == expected


def test_the_counters_of_an_engine_are_its_own(make_core, make_request, run_out):
    given = VirtualTokenCounter()
    served, idle = (make_core(scheduling=given) for _ in range(2))
    feed(served, make_request, 3, "a")
    run_out(served)
    counters = [core.scheduling.counter("a") for core in (served, idle)]
    assert counters[0] > 0
    assert [*counters[1:], given.counter("a")] == [0, 0]
