"""Fleets that a scaling policy grows and shrinks, with real starts, ends and sleeps."""

import asyncio

import pytest

pytest.importorskip("torch", reason="the engine needs torch")

from realengine.fleet.fleet import State
from tests.realengine.fleet.conftest import LONG, assert_same, last, until
from tests.realengine.serving.async_scenarios import prompts


class Wanted:
    """Wants a number of replicas that the test sets; notes what it saw."""

    interval_s = 0.01
    min_replicas = 0
    max_replicas = 2

    def __init__(self, target=1):
        self.wanted = target
        self.seen = []

    def target(self, pool, now):
        names = ("num_replicas", "num_starting", "num_draining", "num_outstanding", "num_running", "kv_usage")
        self.seen.append({name: getattr(pool, name) for name in names})
        assert 0 <= pool.busy_share <= 1.5
        assert pool.num_ended == pool.num_met <= pool.num_arrivals
        return self.wanted


def states(fleet):
    return [each.state for each in fleet.fleet.replicas]


def scaled(make_served, **settings):
    policy = Wanted()
    sleeps = {"sleep_level": 1} if settings.get("enable_sleep_mode") else {}
    return make_served(replicas=1, gateway={"scaling": policy, **sleeps}, **settings), policy


def test_an_engine_more_starts_and_the_superfluous_one_drains(make_served, offline):
    served, policy = scaled(make_served)
    fleet = served.fleet

    async def grow_and_shrink():
        policy.wanted = 2
        await until(lambda: states(fleet) == [State.serving] * 2)
        assert fleet.fleet.last_start_s > 0
        tasks = [asyncio.create_task(last(fleet, prompt, LONG)) for prompt in prompts(6)]
        await until(lambda: all(each.num_outstanding == 3 for each in fleet.fleet.replicas))
        policy.wanted = 1
        await until(lambda: State.draining in states(fleet))
        outputs = await asyncio.gather(*tasks)
        await until(lambda: states(fleet) == [State.serving, State.gone])
        return outputs

    outputs = served.run(grow_and_shrink())
    for output, wanted in zip(outputs, offline.generate(prompts(6), LONG), strict=True):
        assert_same(output, wanted)
    assert any(seen["num_starting"] for seen in policy.seen)
    assert any(seen["num_draining"] for seen in policy.seen)
    assert max(seen["num_outstanding"] for seen in policy.seen) == 6
    assert any(seen["num_running"] and seen["kv_usage"] > 0 for seen in policy.seen)


def test_a_request_starts_the_first_engine_of_an_empty_fleet(make_served, offline):
    served, policy = scaled(make_served)
    fleet = served.fleet

    async def from_zero():
        policy.wanted = 0
        await until(lambda: states(fleet) == [State.gone])
        output = await last(fleet, prompts(1)[0], LONG)
        return output, states(fleet)

    output, found = served.run(from_zero())
    assert_same(output, offline.generate(prompts(1), LONG)[0])
    assert found[0] is State.gone
    assert len(found) == 2


def test_an_engine_that_is_not_needed_sleeps_and_wakes(make_served, offline):
    served, policy = scaled(make_served, enable_sleep_mode=True)
    fleet = served.fleet

    async def sleep_and_wake():
        policy.wanted = 0
        await until(lambda: states(fleet) == [State.asleep])
        output = await last(fleet, prompts(1)[0], LONG)
        assert len(fleet.fleet.replicas) == 1
        return output

    assert_same(served.run(sleep_and_wake()), offline.generate(prompts(1), LONG)[0])
