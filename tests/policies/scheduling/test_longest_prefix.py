"""Longest prefix first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.batching.chunked import Chunked
from policies.caching.pool import KvMemory
from policies.caching.radix import Radix
from policies.core.engine import EngineCore
from policies.core.plan import StepOutcome
from policies.core.request import Prompt, Request, Segment
from policies.scheduling.longest_prefix import LongestPrefix
from tests.examples import examples


class VisitsAll(LongestPrefix):
    """Visits every waiting request in every step, also where the order is that of arrival."""

    def before_step(self, view, step, now):
        self._overdue.bring_forward(view, step, now)
        if not view.num_waiting:
            return
        step.hold(1)
        if view.num_waiting <= self.max_sorted:
            self._sort(view, step)
            return
        behind = set(self._behind)
        self._behind.clear()
        for seq in list(view.waiting):
            self._note_hit(seq, 0, step, has_moved=seq.request_id in behind)
        self._moved.clear()


def make_engine(policy=LongestPrefix, num_blocks=200, max_num_seqs=1, **own):
    return EngineCore(
        batching=Chunked(max_num_batched_tokens=64),
        scheduling=policy(**own),
        block_pool=Radix().pool(KvMemory(num_blocks)),
        max_num_seqs=max_num_seqs,
        max_model_len=500,
    )


def order_of_service(core, now=0.0):
    order = []
    while (plan := core.plan(now)) is not None:
        order += [seq.request_id for seq in plan.admitted]
        core.commit(plan, StepOutcome(), now)
        core.check_integrity()
    return order


def add(core, request_id, *segments, num_output=1):
    prompt = Prompt(sum(n for _, n in segments) + 1, tuple(Segment(*segment) for segment in segments))
    core.add(Request(request_id, float(request_id), prompt), stop_after=num_output)


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


@pytest.mark.parametrize(("num_shared", "order"), [(31, [1, 2, 3]), (32, [1, 3, 2])])
def test_a_request_waits_behind_all_for_one_that_computes_its_prefix(num_shared, order):
    """2 shares its first tokens with 1, and 3 shares none; there is one slot, and nothing is cached yet."""
    core = make_engine(max_num_seqs=1)
    add(core, 1, (0, 60), num_output=1)
    add(core, 2, (0, num_shared), (5, 20), num_output=1)
    add(core, 3, (9, 50), num_output=1)
    core.plan(0.0)
    assert [seq.request_id for seq in core.view.waiting] == order[1:]


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


some_prompts = st.lists(st.tuples(st.integers(0, 2), st.integers(4, 12)), min_size=1, max_size=3)


@examples(30, 120)
@given(
    st.lists(st.tuples(some_prompts, st.integers(1, 30), st.integers(0, 6)), min_size=8, max_size=14),
    st.integers(60, 100),
    st.integers(1, 4),
    st.sampled_from([None, 8.0]),
)
def test_requests_without_a_hit_need_not_be_visited(requests, num_blocks, max_sorted, max_wait_s):
    """Random prompts that share beginnings, too little memory, a queue around max_sorted: two engines."""
    own = {"num_blocks": num_blocks, "max_num_seqs": 3, "max_sorted": max_sorted, "max_wait_s": max_wait_s}
    one, other = make_engine(LongestPrefix, **own), make_engine(VisitsAll, **own)
    now, request_id = 0.0, 0
    while request_id < len(requests) or one.num_unfinished:
        num_steps = 1
        for prompt, num_output, num_steps in requests[request_id : request_id + 3]:  # noqa: B007
            for core in (one, other):
                add(core, request_id, *prompt, num_output=num_output)
            request_id += 1
        for _ in range(num_steps):
            now += 1.0
            assert step(one, now) == step(other, now)


def step(core, now):
    """Runs a step and returns what it decided."""
    plan = core.plan(now)
    if plan is None:
        return None
    decided = plan.num_decodes, [chunk[1:] for chunk in plan.chunks]
    decided += tuple([seq.request_id for seq in seqs] for seqs in (plan.admitted, plan.preempted))
    core.commit(plan, StepOutcome(), now)
    core.check_integrity()
    return decided


def test_rejects_sorting_no_request():
    with pytest.raises(ValueError, match="max_sorted=0: must be >= 1"):
        LongestPrefix(max_sorted=0)
