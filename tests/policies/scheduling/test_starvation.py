"""Schedulers that bound how long a request may be overtaken keep to it, in random worlds."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from experiments.conformance.draws import draw_worlds_with
from experiments.conformance.promises import starvation_bound_s_holds
from policies.prediction.oracles import OracleWithNoise
from policies.scheduling.longest_prefix import LongestPrefix
from policies.scheduling.mlfq import Mlfq
from policies.scheduling.shortest_job import LengthAware, ShortestJobFirst, ShortestRemaining
from tests.examples import IS_FAST

MAKERS = {
    "shortest_job_first": lambda bound_s: ShortestJobFirst(max_wait_s=bound_s),
    "length_aware": lambda bound_s: LengthAware(max_wait_s=bound_s),
    "length_aware, long first": lambda bound_s: LengthAware(long_first=True, max_wait_s=bound_s),
    "shortest_remaining": lambda bound_s: ShortestRemaining(min_gain_tokens=0, max_wait_s=bound_s),
    "longest_prefix": lambda bound_s: LongestPrefix(max_wait_s=bound_s),
    "mlfq": lambda bound_s: Mlfq(quantum_tokens=2, num_levels=3, starvation_s=bound_s),
    "mlfq, some active": lambda bound_s: Mlfq(quantum_tokens=2, starvation_s=bound_s, max_active=2),
}


def in_worlds_of(policy, num_worlds, check):
    """Calls check(world) for worlds in which the policy schedules and all others keep the order of arrival.

    Does not shrink a failing world: that takes minutes.
    """

    @settings(
        max_examples=num_worlds,
        derandomize=True,
        report_multiple_bugs=False,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),
    )
    @given(draw_worlds_with("scheduling", policy, others_in_order=True))
    def in_every_world(world):
        check(replace(world, prediction=OracleWithNoise(error=0.7)))

    in_every_world()


BOUND_S = 0.2


@pytest.mark.parametrize("name", MAKERS)
def test_no_request_is_overtaken_by_those_that_come_later_than_the_bound(name):
    policy = MAKERS[name](BOUND_S)
    assert policy.starvation_bound_s == BOUND_S
    in_worlds_of(policy, 10 if IS_FAST else 25, lambda world: starvation_bound_s_holds(world, BOUND_S))


@pytest.mark.sampled(fast=2, slow=4)
@pytest.mark.parametrize("name", sorted(MAKERS.keys() - {"longest_prefix"}))
def test_without_the_bound_some_request_is_overtaken(name):
    """The worlds above can fail: with a bound of an hour, some request waits while later ones pass.

    Under longest_prefix the first request that comes after the bound and passes is rarer:
    test_longest_prefix.py.
    """
    with pytest.raises(AssertionError, match="were admitted before request"):
        in_worlds_of(MAKERS[name](3600.0), 80, lambda world: starvation_bound_s_holds(world, BOUND_S))


@pytest.mark.parametrize("policy", [ShortestJobFirst(), LengthAware(), LongestPrefix(), ShortestRemaining()])
def test_without_a_limit_nothing_is_claimed(policy):
    assert policy.starvation_bound_s is None
