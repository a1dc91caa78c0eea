"""Ranks of data-parallel attention: each has the budget, slots and KV blocks of a scheduler of its own."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.batching import DataParallel, of_rank
from policies.batching.chunked import Chunked
from policies.batching.inflight import InFlight
from policies.batching.prefill_delayer import PrefillDelayer
from policies.batching.sglang import Sglang
from policies.batching.whole_prompts import PrefillFirst
from policies.caching.paged import Paged
from policies.caching.pool import KvMemory
from policies.caching.prefix import PrefixCaching
from policies.caching.radix import Radix
from policies.core.endings import Ends
from policies.core.engine import EngineCore
from policies.core.limits import RejectedError
from policies.core.plan import StepOutcome
from policies.core.request import Prompt, Request, Segment
from policies.scheduling.fcfs import Fcfs

BLOCK_SIZE = 4


def engine(size, *, batching=None, num_blocks=200, max_num_seqs=8, method="total_requests", **given):
    caching = given.pop("caching", None) or Paged(block_size=BLOCK_SIZE)
    return EngineCore(
        batching=batching or Chunked(max_num_batched_tokens=16),
        scheduling=given.pop("scheduling", None) or Fcfs(),
        block_pool=caching.pool(KvMemory(num_blocks)),
        max_num_seqs=max_num_seqs,
        max_model_len=given.pop("max_model_len", 200),
        data_parallel=DataParallel(size=size, load_balance_method=method) if size > 1 else None,
        **given,
    )


def add(core, request_id, num_prompt, num_output):
    return core.add(Request(request_id, 0.0, Prompt(num_prompt), num_output), num_output)


def tokens_of(plan):
    return {} if plan is None else plan.tokens_by_request


def run(core, *, leaps):
    """Runs an engine to its end, an iteration or a plan at a time; returns the tokens of each iteration."""
    iterations, now = [], max(core.now, 0.0)
    while core.num_unfinished:
        plan = core.plan(now)
        if plan is None:  # KV of a request whose end was read one step late is free now
            assert core.wake_s < math.inf
            now = core.wake_s
            continue
        num = plan.horizon if leaps else 1
        iterations += [tokens_of(plan)] * num
        now += num
        core.commit(plan, StepOutcome(num), now)
        core.check_integrity()
    return iterations


def test_each_rank_has_its_share_of_the_budget():
    """Two ranks share 16 tokens: a prompt of 12 takes two iterations, although the other rank has 8 left."""
    core = engine(2)
    add(core, 0, 12, 2)
    assert tokens_of(core.plan(0.0)) == {0: 8}


def test_the_ranks_compute_a_prompt_each():
    core = engine(2)
    for request_id, num_prompt in enumerate((12, 5, 3, 9)):
        add(core, request_id, num_prompt, 4)
    # Ranks 0, 1, 0, 1: rank 0 computes 8 of 12, rank 1 all 5, and 3 of 9.
    plan = core.plan(0.0)
    assert tokens_of(plan) == {0: 8, 1: 5, 3: 3}
    core.commit(plan, StepOutcome(), 1.0)
    # The decode of request 1 leaves 7 of 8 tokens for request 3, which has 6 to go.
    plan = core.plan(1.0)
    assert tokens_of(plan) == {1: 1, 0: 4, 2: 3, 3: 6}
    assert [(rank.num_decodes, len(rank.chunks)) for rank in plan.ranks] == [(0, 2), (1, 1)]
    assert plan.ranks[1].num_decode_context_tokens == 6


def test_each_rank_has_its_share_of_the_slots():
    """Four slots are two of each rank; the fifth request waits for its own rank."""
    core = engine(2, max_num_seqs=4, method="round_robin")
    for request_id, num_output in enumerate((2, 9, 9, 9, 9)):
        add(core, request_id, 2, num_output)
    core.commit(core.plan(0.0), StepOutcome(), 1.0)
    assert {seq.request_id: seq.dp_rank for seq in core.running.values()} == {0: 0, 1: 1, 2: 0, 3: 1}
    core.commit(core.plan(1.0), StepOutcome(), 2.0)  # request 0 ends
    plan = core.plan(2.0)
    assert [seq.request_id for seq in plan.admitted] == [4]


def test_a_slot_of_another_rank_does_not_help():
    core = engine(2, max_num_seqs=4, method="round_robin")
    for request_id, num_output in enumerate((9, 2, 9, 9, 9)):
        add(core, request_id, 2, num_output)
    core.commit(core.plan(0.0), StepOutcome(), 1.0)
    core.commit(core.plan(1.0), StepOutcome(), 2.0)  # request 1 ends, in rank 1
    assert core.plan(2.0).admitted == []
    assert core.find(4).dp_rank == 0


def test_each_rank_has_its_share_of_the_memory():
    """20 blocks of 4 tokens are 10 of each rank: a prompt of 40 tokens fits, with one output token only."""
    core = engine(2, num_blocks=20, batching=Chunked(max_num_batched_tokens=160))
    with pytest.raises(RejectedError, match="41 tokens: the KV cache holds at most 40"):
        add(core, 9, 41, 1)
    first, second, third = add(core, 0, 30, 4), add(core, 1, 4, 40), add(core, 2, 20, 4)
    assert (first.dp_rank, second.dp_rank, third.dp_rank) == (0, 1, 0)
    plan = core.plan(0.0)
    assert tokens_of(plan) == {0: 30, 1: 4}  # request 2 would fit beside request 1, not beside request 0
    core.commit(plan, StepOutcome(), 1.0)
    core.check_integrity()


def test_memory_of_one_rank_preempts_there_only():
    core = engine(2, num_blocks=12, method="round_robin", batching=Chunked(max_num_batched_tokens=100))
    for request_id in range(4):
        add(core, request_id, 9 if request_id % 2 == 0 else 2, 9)
    run_preempted = set()
    now = 0.0
    while core.num_unfinished:
        plan = core.plan(now)
        run_preempted |= {seq.request_id for seq in plan.preempted}
        now += 1
        core.commit(plan, StepOutcome(), now)
        core.check_integrity()
    assert run_preempted == {2}  # the later of rank 0; rank 1 has room


def test_requests_go_to_the_rank_with_the_fewest_or_in_turn():
    core = engine(3, max_num_seqs=9)
    ranks = [add(core, request_id, 4, 4 if request_id else 1).dp_rank for request_id in range(4)]
    assert ranks == [0, 1, 2, 0]
    core.commit(core.plan(0.0), StepOutcome(), 1.0)  # request 0 ends: the ranks have 1, 1 and 1
    assert [add(core, request_id, 4, 4).dp_rank for request_id in (4, 5, 6)] == [1, 2, 0]
    turns = engine(3, max_num_seqs=9, method="round_robin")
    assert [add(turns, request_id, 4, 1).dp_rank for request_id in range(5)] == [0, 1, 2, 0, 1]


def test_a_preempted_request_stays_in_its_rank():
    core = engine(2, num_blocks=12, batching=Chunked(max_num_batched_tokens=100))
    seqs = [add(core, request_id, 9, 12) for request_id in range(4)]
    before = [seq.dp_rank for seq in seqs]
    run(core, leaps=True)
    assert sum(seq.num_preemptions for seq in seqs) > 0
    assert [seq.dp_rank for seq in seqs] == before


@pytest.mark.parametrize("caching", [PrefixCaching, Radix])
def test_a_prefix_is_found_in_its_own_rank_only(caching):
    core = engine(2, method="round_robin", caching=caching(block_size=BLOCK_SIZE), num_blocks=100)
    segments = (Segment(7, 12),)
    found = []
    for request_id in range(3):
        request = Request(request_id, 0.0, Prompt(13, segments), 1)
        assert core.ranks.peek(request) == (12 if request_id else 0)
        seq = core.add(request, 1)
        run(core, leaps=True)
        found.append((seq.dp_rank, seq.num_found))
    assert found == [(0, 0), (1, 0), (0, 12)]


def test_sglang_divides_its_chunk_and_conservativeness():
    own = of_rank(Sglang(max_num_batched_tokens=8192, max_prefill_tokens=16384), 8)
    assert (own.max_num_batched_tokens, own.max_prefill_tokens) == (1024, 16384)
    assert own.schedule_conservativeness == pytest.approx(0.3)


def test_delayed_prompts_wait_for_a_prompt_of_every_rank():
    batching = PrefillDelayer(max_num_batched_tokens=64, num_ranks=2, max_delay_passes=50)
    core = engine(2, batching=batching, method="round_robin")
    add(core, 0, 4, 30)
    core.commit(core.plan(0.0), StepOutcome(), 1.0)
    core.commit(core.plan(1.0), StepOutcome(), 2.0)
    add(core, 1, 4, 30)  # rank 1: delayed, as rank 0 has no prompt
    assert tokens_of(core.plan(2.0)) == {0: 1}
    core.commit(core.in_flight, StepOutcome(), 3.0)
    add(core, 2, 20, 30)  # rank 0: now both have one, and each the whole budget of a rank
    assert tokens_of(core.plan(3.0)) == {0: 1, 1: 4, 2: 20}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 0}, r"size=0: must be >= 1"),
        ({"size": 2, "load_balance_method": "fair"}, r"load_balance_method=fair: must be one of total_req"),
    ],
)
def test_settings_that_are_wrong_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DataParallel(**settings)


def test_ranks_need_a_slot_each():
    with pytest.raises(ValueError, match=r"max_num_seqs=3: must be >= 4, one for each rank"):
        engine(4, max_num_seqs=3)


POLICIES = {
    "chunked": lambda budget: Chunked(max_num_batched_tokens=budget),
    "threshold": lambda budget: Chunked(max_num_batched_tokens=budget, long_prefill_token_threshold=3),
    "whole": lambda budget: Chunked(max_num_batched_tokens=budget, enable_chunked_prefill=False),
    "first": lambda budget: PrefillFirst(max_num_batched_tokens=budget),
    "inflight": lambda budget: InFlight(max_num_batched_tokens=budget),
    "max_utilization": lambda budget: InFlight(
        max_num_batched_tokens=budget, capacity_scheduler_policy="max_utilization"
    ),
}
REQUESTS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 22), st.integers(1, 20)), min_size=1, max_size=14
)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(POLICIES)),
    st.integers(2, 4),
    st.integers(4, 12),
    st.integers(1, 4),
    st.integers(11, 20),
    REQUESTS,
)
def test_every_rank_plans_as_a_scheduler_of_its_own(name, size, budget, slots, blocks, requests):
    """In lock-step, `size` engines with their shares compute the same tokens in the same iterations.

    This is vLLM's data parallelism: an engine core, with a scheduler, for each rank.
    """
    make, ends = POLICIES[name], [(at, p, o) for at, p, o in sorted(requests)]
    joint = engine(
        size,
        batching=make(size * budget),
        num_blocks=size * blocks,
        max_num_seqs=size * slots,
        max_model_len=44,
    )
    own = [
        engine(1, batching=make(budget), num_blocks=blocks, max_num_seqs=slots, max_model_len=44)
        for _ in range(size)
    ]
    waiting = [(at, i, p, o) for i, (at, p, o) in enumerate(ends)]
    step = 0
    while waiting or joint.num_unfinished:
        now = float(step)
        while waiting and waiting[0][0] <= step:
            _, request_id, num_prompt, num_output = waiting.pop(0)
            seq = add(joint, request_id, num_prompt, num_output)
            add(own[seq.dp_rank], request_id, num_prompt, num_output)
        step += 1
        plan, plans = joint.plan(now), [core.plan(now) for core in own]
        expected = {}
        for each in plans:
            expected |= tokens_of(each)
        assert tokens_of(plan) == expected
        for rank, each in enumerate(plans):
            if each is None:
                continue
            assert plan is not None
            assert sum(tokens_of(each).values()) <= budget
            work = plan.ranks[rank]
            assert (work.num_decodes, len(work.chunks)) == (each.num_decodes, len(each.chunks))
            assert work.num_decode_context_tokens == each.num_decode_context_tokens
            own[rank].commit(each, StepOutcome(), now + 1)
        if plan is not None:
            preempted = {seq.request_id for each in plans if each for seq in each.preempted}
            assert {seq.request_id for seq in plan.preempted} == preempted
            joint.commit(plan, StepOutcome(), now + 1)
            joint.check_integrity()
            for rank, members in enumerate(joint.ranks.members):
                assert set(members) == set(own[rank].running)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([*sorted(POLICIES), "sglang"]),
    st.sampled_from(["at_once", "one_step_late"]),
    st.booleans(),
    st.booleans(),
    st.integers(2, 4),
    st.integers(11, 20),
    st.lists(st.tuples(st.integers(1, 22), st.integers(1, 20)), min_size=1, max_size=14),
)
def test_a_leap_is_many_steps(name, ends, finds_prefixes, reorders, size, blocks, requests):
    makers = POLICIES | {"sglang": lambda budget: Sglang(max_num_batched_tokens=budget)}
    caching = PrefixCaching if finds_prefixes else Paged

    def iterations(*, leaps):
        core = engine(
            size,
            batching=makers[name](8 * size),
            caching=caching(block_size=BLOCK_SIZE),
            num_blocks=size * blocks,
            max_num_seqs=3 * size,
            max_model_len=44,
            ends=Ends[ends],
        )
        for request_id, (num_prompt, num_output) in enumerate(requests):
            add(core, request_id, num_prompt, num_output)
        return run(core, leaps=leaps)

    assert iterations(leaps=True) == iterations(leaps=False)
