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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold=-1: must be >= 0"),
        (
            {"long_prefill_token_threshold_adaptive": True},
            "long_prefill_token_threshold=0: there is no limit to raise",
        ),
    ],
)
def test_rejects_thresholds_that_mean_nothing(settings, message):
    with pytest.raises(ValueError, match=message):
        Chunked(**settings)
