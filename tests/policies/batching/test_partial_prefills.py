"""Shares of the budget and short prompts that pass long ones, worked out on paper."""

import pytest

from policies.batching.chunked import Chunked
from policies.batching.partial_prefills import PartialPrefills

A, B, C = range(3)


def test_a_short_prompt_passes_a_second_long_one(make_core, make_request, run_out):
    """Budget 8, two shares, one long prompt (above 4) at a time. A: 12, B: 10, C: 3.

    step  under way or able to be  share  served
    0     A, C (B is a second long) 4      A 4, C 3
    1     A                         8      A 8; B waits, A was long when the step began
    2     B                         8      B 8
    3     B                         8      B 2
    """
    policy = PartialPrefills(
        max_num_batched_tokens=8, max_num_partial_prefills=2, long_prefill_token_threshold=4
    )
    core = make_core(batching=policy)
    for request_id, prompt in [(A, 12), (B, 10), (C, 3)]:
        core.add(make_request(request_id, prompt), stop_after=1)
    assert [step[0] for step in run_out(core)] == [{A: 4, C: 3}, {A: 8}, {B: 8}, {B: 2}]


def test_one_partial_prefill_is_plain_chunked_prefill(make_core, make_request, run_out):
    decision_logs = []
    for policy in (
        PartialPrefills(max_num_batched_tokens=6, max_num_partial_prefills=1, long_prefill_token_threshold=2),
        Chunked(max_num_batched_tokens=6),
    ):
        core = make_core(batching=policy, num_blocks=5)
        for request_id, prompt, answer in [(A, 5, 6), (B, 6, 4), (C, 3, 3)]:
            core.add(make_request(request_id, prompt), stop_after=answer)
        decision_logs.append(run_out(core))
    assert decision_logs[0] == decision_logs[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_partial_prefills": 0}, "max_num_partial_prefills=0: must be >= 1"),
        ({"max_long_partial_prefills": 5}, "max_long_partial_prefills=5: must be <= max_num_partial"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold=-1: must be >= 0"),
    ],
)
def test_rejects_shares_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        PartialPrefills(**settings)
