"""Longest prefix first."""

import pytest

from policies.batching.chunked import Chunked
from policies.caching.radix import Radix
from policies.caching.settings import KvMemory
from policies.core.engine import EngineCore
from policies.core.plan import StepOutcome
from policies.core.request import Prompt, Request, Segment
from policies.scheduling.longest_prefix import LongestPrefix


def make_engine(**settings):
    return EngineCore(
        batching=Chunked(max_num_batched_tokens=64),
        scheduling=LongestPrefix(**settings),
        block_pool=Radix().pool(KvMemory(200)),
        max_num_seqs=1,
        max_model_len=500,
    )


def order_of_service(core, now=0.0):
    order = []
    while (plan := core.plan(now)) is not None:
        order += [seq.request_id for seq in plan.admitted]
        core.commit(plan, StepOutcome(), now)
        core.check_integrity()
    return order


def add(core, request_id, *segments):
    prompt = Prompt(sum(n for _, n in segments) + 1, tuple(Segment(*segment) for segment in segments))
    core.add(Request(request_id, float(request_id), prompt), stop_after=1)


def test_the_longest_hit_goes_first_and_is_looked_up_again_before_every_admission():
    """After 0 the tree holds (0, 20). 3 shares 20 tokens of it, 2 shares 10, 1 none; 4 shares 30 with 3."""
    core = make_engine()
    add(core, 0, (0, 20))
    assert order_of_service(core) == [0]
    add(core, 1, (9, 20))
    add(core, 2, (0, 10))
    add(core, 3, (0, 20), (5, 10))
    add(core, 4, (0, 20), (5, 10), (6, 3))
    assert order_of_service(core) == [3, 4, 2, 1]


def test_with_too_many_waiting_it_is_first_come_first_served():
    core = make_engine(max_sorted=2)
    add(core, 0, (0, 20))
    assert order_of_service(core) == [0]
    add(core, 1, (9, 20))
    add(core, 2, (9, 20))
    add(core, 3, (0, 20))
    assert order_of_service(core) == [1, 2, 3]


@pytest.mark.parametrize(("max_wait_s", "order"), [(None, [3, 2, 1]), (10.0, [3, 2, 1]), (9.0, [1, 3, 2])])
def test_a_request_that_has_waited_for_too_long_goes_before_any_hit(max_wait_s, order):
    """At 10 s; 1 came at 1 s and finds nothing, 3 finds 20 tokens, 2 finds 10."""
    core = make_engine(max_wait_s=max_wait_s)
    add(core, 0, (0, 20))
    assert order_of_service(core) == [0]
    add(core, 1, (9, 20))
    add(core, 2, (0, 10))
    add(core, 3, (0, 20))
    assert order_of_service(core, 10.0) == order


def test_rejects_sorting_no_request():
    with pytest.raises(ValueError, match="max_sorted=0: must be >= 1"):
        LongestPrefix(max_sorted=0)
