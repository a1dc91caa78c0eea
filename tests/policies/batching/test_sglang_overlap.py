"""The rules of SGLang's overlapped loop and of what its cache evicts, worked out on paper (SGLang 0.5.23).

`make parity` compares with SGLang itself.
"""

import pytest

from policies.batching.sglang import Sglang
from policies.caching.paged import Paged
from policies.caching.pool import KvMemory
from policies.caching.radix import Radix
from policies.core.endings import Ends
from policies.core.engine import EngineCore
from policies.core.plan import StepOutcome
from policies.core.release import SGLANG_0_5, VLLM_0_32
from policies.core.request import Prompt, Request, Segment
from policies.scheduling.fcfs import QueueOrder
from policies.scheduling.longest_prefix import LongestPrefix

A, B, C, D = range(4)


def make_engine(
    *,
    num_tokens=100,
    page=1,
    is_overlapped=True,
    max_num_seqs=8,
    caching=Paged,
    scheduling=None,
    release=SGLANG_0_5,
    **settings,
):
    return EngineCore(
        batching=Sglang(**settings),
        scheduling=scheduling or QueueOrder(),
        block_pool=caching(block_size=page, watermark=0.0).pool(KvMemory(num_tokens // page)),
        max_num_seqs=max_num_seqs,
        max_model_len=1000,
        ends=Ends.one_step_late if is_overlapped else Ends.at_once,
        release=release,
    )


def request(request_id, num_prompt_tokens, max_tokens, *segments, answer_id=None):
    return Request(
        request_id, 0.0, Prompt(num_prompt_tokens, segments), max_tokens=max_tokens, answer_id=answer_id
    )


def run(core):
    """Runs a step; returns its tokens by request id."""
    plan = core.plan(0.0)
    tokens = plan.tokens_by_request
    core.commit(plan, StepOutcome(), 0.0)
    core.check_integrity()
    return tokens


def found(core):
    """Runs a step with prompts; returns the tokens found in the cache by request id."""
    plan = core.plan(0.0)
    core.commit(plan, StepOutcome(), 0.0)
    return {chunk.seq.request_id: chunk.num_cached for chunk in plan.chunks}


@pytest.mark.parametrize(("is_overlapped", "admitted"), [(True, {A: 1}), (False, {B: 10})])
def test_an_unread_token_is_still_promised(is_overlapped, admitted):
    """A holds 10 of 100 tokens. 41 more are promised to it if its first token is not read, else 40.

    B needs 10 + 38 + 1 = 49 tokens, which must be fewer than 90 - 41 = 49 or 90 - 40 = 50.
    """
    core = make_engine(is_overlapped=is_overlapped, schedule_conservativeness=2.0)
    core.add(request(A, 10, 41))
    assert run(core) == {A: 10}
    core.add(request(B, 10, 38))
    assert run(core) == admitted


@pytest.mark.parametrize(
    ("is_overlapped", "steps"),
    [(True, [{A: 1, B: 1}, {B: 1}, {C: 4}]), (False, [{A: 1, B: 1}, {C: 4}, {B: 1, C: 1}])],
)
def test_an_ended_request_holds_its_slot_for_a_step(is_overlapped, steps):
    core = make_engine(is_overlapped=is_overlapped, max_num_seqs=2)
    core.add(request(A, 4, 2))
    core.add(request(B, 4, 9))
    assert run(core) == {A: 4, B: 4}
    core.add(request(C, 4, 9))
    assert [run(core) for _ in steps] == steps


def test_nothing_is_retracted_while_an_ended_request_is_about_to_free_its_memory():
    """B holds 5 of 29 tokens and A 6. Nine decodes of both fill the pool, and A is complete."""
    core = make_engine(num_tokens=29, schedule_conservativeness=0.1)
    core.add(request(B, 5, 20))
    run(core)
    core.add(request(A, 6, 10))
    assert run(core) == {A: 6}
    assert [run(core) for _ in range(9)] == [{A: 1, B: 1}] * 9
    assert core.block_pool.num_free == 0
    assert run(core) == {B: 1}
    assert core.num_preemptions == 0


@pytest.mark.parametrize(("release", "num_lost"), [(SGLANG_0_5, 1), (VLLM_0_32, 0)])
def test_a_retracted_request_loses_the_token_that_was_not_read(release, num_lost):
    core = make_engine(num_tokens=30, schedule_conservativeness=0.1, release=release)
    core.add(request(A, 6, 20))
    run(core)
    run(core)
    later = core.add(request(B, 7, 12))
    assert run(core) == {B: 7}
    while True:
        num_output = later.num_output_tokens
        plan = core.plan(0.0)
        if plan.preempted:
            break
        core.commit(plan, StepOutcome(), 0.0)
    assert [seq.request_id for seq in plan.preempted] == [B]
    assert later.num_output_tokens == num_output - num_lost
    core.commit(plan, StepOutcome(), 0.0)
    ended = []
    while core.num_unfinished:
        plan = core.plan(0.0)
        ended += core.commit(plan, StepOutcome(), 0.0)[1]
    assert {seq.request_id: seq.num_output_tokens for seq in ended} == {A: 20, B: 12}


@pytest.mark.parametrize(
    ("is_overlapped", "release", "hit"), [(True, SGLANG_0_5, 0), (True, VLLM_0_32, 7), (False, SGLANG_0_5, 7)]
)
def test_a_prompt_enters_the_cache_when_its_step_is_read(is_overlapped, release, hit):
    """B comes while A's prompt runs, C one step later."""
    core = make_engine(caching=Radix, is_overlapped=is_overlapped, release=release)
    prompt = Segment(7, 8)
    core.add(request(A, 8, 9, prompt))
    assert found(core) == {A: 0}
    core.add(request(B, 8, 9, prompt))
    assert found(core) == {B: hit}
    core.add(request(C, 8, 9, prompt))
    assert found(core) == {C: 7}


def test_the_first_chunks_of_a_prompt_are_in_the_cache_at_the_next_step():
    core = make_engine(caching=Radix, max_num_batched_tokens=10)
    core.add(request(A, 15, 9, Segment(7, 15)))
    assert found(core) == {A: 0}
    core.add(request(B, 15, 9, Segment(7, 15)))
    assert found(core) == {A: 10, B: 10}


@pytest.mark.parametrize(("release", "num_cached"), [(SGLANG_0_5, 6), (VLLM_0_32, 5)])
def test_the_kv_of_a_stop_token_is_cached_if_the_next_step_has_computed_it(release, num_cached):
    """A's prompt has 4 tokens; its answer stops with the second one, which goes through one more step."""
    core = make_engine(caching=Radix, release=release)
    core.add(request(A, 4, 9, Segment(7, 4), answer_id=8), 2)
    assert [run(core) for _ in range(3)] == [{A: 4}, {A: 1}, {A: 1}]
    assert core.plan(0.0) is None
    follow_up = request(B, 9, 1, Segment(7, 4), Segment(8, 2), Segment(9, 3))
    assert core.block_pool.peek(follow_up) == num_cached


def with_two_prefixes(**settings):
    """Returns an engine with 30 tokens whose cache has 5 tokens, used first, and 10 others."""
    core = make_engine(num_tokens=30, caching=Radix, is_overlapped=False, **settings)
    core.add(request(A, 5, 1, Segment(1, 5)))
    run(core)
    core.add(request(B, 10, 1, Segment(2, 10)))
    run(core)
    return core


def test_no_prompt_of_a_step_loses_its_hit_to_another_one():
    """C's 17 tokens need 2 more than are unused. D finds the 5 old ones, so the 10 others are evicted."""
    core = with_two_prefixes()
    core.add(request(C, 17, 1, Segment(3, 17)))
    core.add(request(D, 6, 1, Segment(1, 5), Segment(4, 1)))
    assert found(core) == {C: 0, D: 5}
    assert core.block_pool.peek(request(A, 11, 1, Segment(2, 10), Segment(9, 1))) == 0


@pytest.mark.parametrize(("num_passes", "hit"), [(1, 5), (32, 0)])
def test_prefixes_of_waiting_requests_are_marked_as_used_from_time_to_time(monkeypatch, num_passes, hit):
    """C takes the only slot. The third pass marks D's 5 tokens, or does not; then 2 tokens are evicted."""
    monkeypatch.setattr("policies.batching.sglang.NUM_PASSES_PER_REFRESH", num_passes)
    core = with_two_prefixes(max_num_seqs=1)
    core.add(request(C, 17, 1, Segment(3, 17)))
    core.add(request(D, 6, 1, Segment(1, 5), Segment(4, 1)))
    assert found(core) == {C: 0}
    assert found(core) == {D: hit}


def test_a_retraction_evicts_for_twenty_steps_of_the_others():
    """B's prompt stays in the tree when B is retracted, but 20 tokens must be free for A: it is evicted."""
    core = make_engine(num_tokens=30, caching=Radix, is_overlapped=False, schedule_conservativeness=0.1)
    core.add(request(A, 6, 20, Segment(1, 6)))
    run(core)
    run(core)
    core.add(request(B, 7, 12, Segment(2, 7)))
    while not (plan := core.plan(0.0)).preempted:
        core.commit(plan, StepOutcome(), 0.0)
    assert [seq.request_id for seq in plan.preempted] == [B]
    assert core.block_pool.num_free == core.block_pool.num_free_without_content


def test_lpm_counts_a_page_that_is_computed_again():
    """Of C's only page all 4 tokens are cached. It must be computed again, but 3 tokens count as a hit."""
    core = make_engine(page=4, caching=Radix, scheduling=LongestPrefix(), is_overlapped=False, max_num_seqs=1)
    core.add(request(A, 4, 1, Segment(1, 4)))
    run(core)
    core.add(request(B, 2, 1, Segment(1, 2)))
    core.add(request(C, 4, 1, Segment(1, 4)))
    assert run(core) == {C: 4}
