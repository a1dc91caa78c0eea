"""llama.cpp's slots against a schedule worked out on paper."""

import pytest

from policies.batching.slots import Slots
from policies.core.limits import RejectedError
from policies.core.request import Branching

A, B, C = range(3)


def test_slots_follow_the_schedule_worked_out_on_paper(make_core, make_request, run_out):
    """Two slots, n_batch 6. A: prompt 4, answer 1. B: 12, 1. C: 8, 2, takes A's slot and so goes before B."""
    core = make_core(batching=Slots(n_parallel=2, n_batch=6))
    for request_id, prompt, answer in [(A, 4, 1), (B, 12, 1), (C, 8, 2)]:
        core.add(make_request(request_id, prompt), stop_after=answer)
    assert [step[0] for step in run_out(core)] == [
        {A: 4, B: 2},
        {C: 6},
        {C: 2, B: 4},
        {C: 1, B: 5},
        {B: 1},
    ]


def test_a_prompt_needs_a_slot_with_a_token_to_spare(make_core, make_request, run_out):
    """n_ctx 16 over two slots: 8 tokens each. A prompt of 8 is refused; one of 7 gets one token of answer."""
    core = make_core(batching=Slots(n_parallel=2), max_model_len=16 // 2)
    with pytest.raises(RejectedError, match="prompt of 8 tokens: max_model_len is 8"):
        core.add(make_request(A, 8), stop_after=5)
    core.add(make_request(B, 7), stop_after=5)
    assert [step[0] for step in run_out(core)] == [{B: 7}]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_parallel": 0}, "n_parallel=0: must be >= 1"),
        ({"n_parallel": 8, "n_batch": 7}, "n_batch=7: must be >= n_parallel=8, one token per slot"),
    ],
)
def test_rejects_slots_that_cannot_all_decode(settings, message):
    with pytest.raises(ValueError, match=message):
        Slots(**settings)


def test_a_prompt_behind_the_branches_of_another_is_computed(make_core, make_request, run_out):
    """Three slots, two of them A's, the third B's. C wants four, and so waits until all are free."""
    core = make_core(batching=Slots(n_parallel=3, n_batch=8))
    core.add(make_request(A, 2)._replace(branching=Branching(2)), stop_after=3)
    core.add(make_request(B, 9), stop_after=1)
    core.add(make_request(C, 2)._replace(branching=Branching(4)), stop_after=1)
    steps = run_out(core)
    assert [step[0] for step in steps] == [{A: 2, B: 6}, {A: 2, B: 3}, {A: 2}, {C: 2}]


def test_a_request_for_more_answers_than_slots_has_the_server_to_itself(make_core, make_request, run_out):
    core = make_core(batching=Slots(n_parallel=2, n_batch=8))
    core.add(make_request(A, 2)._replace(branching=Branching(4)), stop_after=2)
    core.add(make_request(B, 3), stop_after=1)
    assert [step[0] for step in run_out(core)] == [{A: 2}, {A: 4}, {B: 3}]
