"""No batching, against a schedule worked out on paper."""

import pytest

from policies.batching.static import OneAtATime

A, B = range(2)


def test_one_at_a_time_ends_a_request_before_the_next(make_core, make_request, run_out):
    core = make_core(batching=OneAtATime(max_num_batched_tokens=4))
    core.add(make_request(A, 5), stop_after=3)
    core.add(make_request(B, 2), stop_after=1)
    assert [step[0] for step in run_out(core)] == [{A: 4}, {A: 1}, {A: 1}, {A: 1}, {B: 2}]


def test_rejects_a_budget_below_one_token():
    with pytest.raises(ValueError, match="max_num_batched_tokens=0: must be >= 1"):
        OneAtATime(max_num_batched_tokens=0)
