"""Iteration-level scheduling against a schedule worked out on paper."""

import pytest

from policies.batching.whole_prompts import Orca

A, B, C = range(3)


def test_orca_computes_whole_prompts_beside_decodes(make_core, make_request, run_out):
    """Batch of two. A: prompt 9, answer 2. B: 5, 3. C: 2, 1, takes A's place after the next iteration."""
    core = make_core(batching=Orca(batch_size=2))
    for request_id, prompt, answer in [(A, 9, 2), (B, 5, 3), (C, 2, 1)]:
        core.add(make_request(request_id, prompt), stop_after=answer)
    assert [step[0] for step in run_out(core)] == [{A: 9, B: 5}, {A: 1, B: 1}, {B: 1, C: 2}]


def test_rejects_a_batch_below_one_request():
    with pytest.raises(ValueError, match="batch_size=0: must be >= 1"):
        Orca(batch_size=0)
