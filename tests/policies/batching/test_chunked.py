"""vLLM v1's limits on prompts within chunked prefill, against schedules worked out on paper."""

import pytest

from policies.batching.chunked import Chunked
from policies.core.plan import Cause

A, B, C = range(3)


def tokens_of(run_out, core):
    return [tokens for tokens, _, _ in run_out(core)]


def test_a_threshold_lets_prompts_share_steps_in_the_order_of_admission(make_core, make_request, run_out):
    """Budget 10, threshold 4. A: prompt 10, answer 2. B: 3, 3."""
    core = make_core(batching=Chunked(max_num_batched_tokens=10, long_prefill_token_threshold=4))
    core.add(make_request(A, 10), stop_after=2)
    core.add(make_request(B, 3), stop_after=3)
    assert tokens_of(run_out, core) == [{A: 4, B: 3}, {B: 1, A: 4}, {B: 1, A: 2}, {A: 1}]


def test_a_begun_prompt_goes_before_decodes_admitted_after_it(make_core, make_request, run_out):
    """Budget 4, threshold 3: A takes 3 of each step, B, which came later, what is left."""
    core = make_core(batching=Chunked(max_num_batched_tokens=4, long_prefill_token_threshold=3))
    core.add(make_request(A, 9), stop_after=1)
    core.add(make_request(B, 1), stop_after=4)
    core.add(make_request(C, 5), stop_after=1)
    assert tokens_of(run_out, core) == [
        {A: 3, B: 1},
        {A: 3, B: 1},
        {A: 3, B: 1},
        {B: 1, C: 3},
        {C: 2},
    ]


def test_a_request_alone_is_not_held_back_by_the_threshold(make_core, make_request, run_out):
    core = make_core(batching=Chunked(max_num_batched_tokens=10, long_prefill_token_threshold=4))
    core.add(make_request(A, 10), stop_after=1)
    assert tokens_of(run_out, core) == [{A: 10}]


def test_an_adaptive_threshold_is_at_least_an_equal_share(make_core, make_request, run_out):
    """Budget 12. Two requests: max(4, 12 // 2) = 6. Alone, A has no limit."""
    core = make_core(
        batching=Chunked(
            max_num_batched_tokens=12,
            long_prefill_token_threshold=4,
            long_prefill_token_threshold_adaptive=True,
        )
    )
    core.add(make_request(A, 15), stop_after=1)
    core.add(make_request(B, 3), stop_after=1)
    assert tokens_of(run_out, core) == [{A: 6, B: 3}, {A: 9}]


def test_without_chunking_a_prompt_waits_for_room_and_no_request_passes_it(make_core, make_request, run_step):
    """Budget 8: B (5) does not fit beside A (6), and C (1), which would, stays behind it."""
    core = make_core(batching=Chunked(max_num_batched_tokens=8, enable_chunked_prefill=False))
    for request_id, prompt, answer in [(A, 6, 2), (B, 5, 1), (C, 1, 1)]:
        core.add(make_request(request_id, prompt), stop_after=answer)
    assert run_step(core)[0] == {A: 6}
    assert run_step(core)[0] == {A: 1, B: 5, C: 1}


def test_without_chunking_a_prompt_above_the_budget_is_split_all_the_same(make_core, make_request, run_out):
    core = make_core(batching=Chunked(max_num_batched_tokens=8, enable_chunked_prefill=False))
    core.add(make_request(A, 9), stop_after=1)
    core.add(make_request(B, 8), stop_after=1)
    assert tokens_of(run_out, core) == [{A: 8}, {A: 1}, {B: 8}]


def test_a_spent_budget_is_named_as_the_cause_of_waiting(make_core, make_request):
    core = make_core(batching=Chunked(max_num_batched_tokens=4))
    core.add(make_request(A, 9))
    core.add(make_request(B, 1))
    assert core.plan(0.0).waits_for is Cause.budget


def test_a_chunk_held_back_by_the_threshold_is_leapt_over(make_core, make_request):
    """A needs 4 chunks of 4; the first three repeat. B is complete and ends after 9 tokens."""
    core = make_core(batching=Chunked(max_num_batched_tokens=10, long_prefill_token_threshold=4))
    core.add(make_request(A, 16), stop_after=2)
    core.add(make_request(B, 16), stop_after=2)
    assert core.plan(0.0).horizon == 3


def test_fewer_tokens_are_scheduled_than_the_batch_can_hold(make_core, make_request, run_out):
    """The threshold's equal share is of the batch: max(1, 8 // 2) = 4, of which the 6 tokens allow A one."""
    core = make_core(
        batching=Chunked(
            max_num_batched_tokens=8,
            max_num_scheduled_tokens=6,
            long_prefill_token_threshold=1,
            long_prefill_token_threshold_adaptive=True,
        )
    )
    core.add(make_request(A, 9), stop_after=1)
    core.add(make_request(B, 5), stop_after=1)
    assert tokens_of(run_out, core) == [{A: 4, B: 2}, {A: 4, B: 2}, {A: 1, B: 1}]


def test_no_more_sequences_run_than_may_be_active(make_core, make_request, run_out):
    core = make_core(batching=Chunked(max_num_active_seqs=2), max_num_seqs=3)
    for request_id, num_output in [(A, 1), (B, 3), (C, 2)]:
        core.add(make_request(request_id, 4), stop_after=num_output)
    assert tokens_of(run_out, core) == [{A: 4, B: 4}, {B: 1, C: 4}, {B: 1, C: 1}]


@pytest.mark.parametrize(
    ("reserves", "expected"),
    [
        (True, [({A: 4}, []), ({A: 1}, []), ({A: 1}, []), ({B: 8}, []), ({B: 4}, [])]),
        (False, [({A: 4, B: 4}, []), ({A: 1}, [B]), ({A: 1}, []), ({B: 8}, []), ({B: 4}, [])]),
    ],
)
def test_an_admission_needs_room_for_the_prompt_or_for_its_first_chunk(
    make_core, make_request, run_out, reserves, expected
):
    """3 blocks of 4, budget 8. A: prompt 4, answer 3. B: 12, 1; its second chunk has no room beside A."""
    core = make_core(
        batching=Chunked(max_num_batched_tokens=8, scheduler_reserve_full_isl=reserves), num_blocks=3
    )
    core.add(make_request(A, 4), stop_after=3)
    core.add(make_request(B, 12), stop_after=1)
    assert [(tokens, preempted) for tokens, preempted, _ in run_out(core)] == expected


def test_a_first_chunk_keeps_the_watermark_free(make_core, make_request):
    """10 blocks of 4, of which 2 stay free: A has 6, so B's first chunk of 2 fits, and one of 3 does not."""
    for budget, admitted in [(32, [A, B]), (36, [A])]:
        core = make_core(
            batching=Chunked(max_num_batched_tokens=budget, scheduler_reserve_full_isl=False),
            num_blocks=10,
            watermark=0.2,
        )
        core.add(make_request(A, 24))
        core.add(make_request(B, 20))
        assert [seq.request_id for seq in core.plan(0.0).admitted] == admitted


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold=-1: must be >= 0"),
        (
            {"long_prefill_token_threshold_adaptive": True},
            "long_prefill_token_threshold=0: there is no limit to raise",
        ),
        (
            {"max_num_scheduled_tokens": 9000},
            "max_num_scheduled_tokens=9000: must be >= 1 and <= max_num_batch",
        ),
        ({"max_num_active_seqs": 0}, "max_num_active_seqs=0: must be >= 1, or null for max_num_seqs"),
    ],
)
def test_rejects_limits_that_mean_nothing(settings, message):
    with pytest.raises(ValueError, match=message):
        Chunked(**settings)
