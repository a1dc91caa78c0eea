"""SGLang's admission, cuts and retraction, worked out on paper; `make parity` compares with SGLang itself."""

import pytest

from policies.batching.sglang import Sglang
from policies.core.plan import StepOutcome
from policies.scheduling.fcfs import QueueOrder

A, B, C = range(3)


def make_engine(make_core, *, num_tokens=100, **settings):
    """Returns a core with pages of one token."""
    return make_core(
        batching=Sglang(**settings), scheduling=QueueOrder(), num_blocks=num_tokens, block_size=1
    )


def test_prompts_come_before_decodes_and_only_the_last_is_cut(make_core, make_request, run_step):
    core = make_engine(make_core, max_num_batched_tokens=10)
    for request_id, num_prompt_tokens in ((A, 6), (B, 9), (C, 3)):
        core.add(make_request(request_id, num_prompt_tokens, max_tokens=5))
    assert run_step(core)[0] == {A: 6, B: 4}
    assert run_step(core)[0] == {B: 5, C: 3}
    assert run_step(core)[0] == {A: 1, B: 1, C: 1}


def test_decodes_join_prompts_in_mixed_chunks_and_count_against_them(make_core, make_request, run_step):
    core = make_engine(make_core, max_num_batched_tokens=10, mixed_chunk=True)
    core.add(make_request(A, 6, max_tokens=5))
    assert run_step(core)[0] == {A: 6}
    core.add(make_request(B, 12, max_tokens=5))
    assert run_step(core)[0] == {A: 1, B: 9}


@pytest.mark.parametrize(("num_prompt_tokens", "is_admitted"), [(22, True), (23, False)])
def test_a_request_needs_room_for_its_answer_and_what_the_running_may_need(
    make_core, make_request, run_step, num_prompt_tokens, is_admitted
):
    """A holds 10 tokens, and 0.7 x (41 - 1) = 28 more are promised to it, so that fewer than 62 are left.

    B takes its prompt, 38 output tokens and one page.
    """
    core = make_engine(make_core)
    core.add(make_request(A, 10, max_tokens=41))
    assert run_step(core)[0] == {A: 10}
    core.add(make_request(B, num_prompt_tokens, max_tokens=38))
    assert run_step(core)[0] == ({B: num_prompt_tokens} if is_admitted else {A: 1})


def test_a_request_that_does_not_fit_waits_until_another_leaves(make_core, make_request, run_step):
    """The smaller one behind it waits, too, although it would fit."""
    core = make_engine(make_core)
    core.add(make_request(A, 10, max_tokens=3))
    run_step(core)
    core.add(make_request(B, 80, max_tokens=15))
    core.add(make_request(C, 5, max_tokens=5))
    assert [run_step(core)[0] for _ in range(3)] == [{A: 1}, {A: 1}, {B: 80}]


@pytest.mark.parametrize(("num_decodes", "is_admitted"), [(1, False), (400, True)])
def test_less_is_promised_to_the_running_the_longer_the_engine_decodes(
    make_core, make_request, run_step, num_decodes, is_admitted
):
    """B needs 450 tokens. At first 0.7 x 998 of the 1,088 free ones are promised to A.

    After 400 decodes the ratio is 0.7 - 400 x 0.602 / 600 = 0.299, and 0.299 x 599 of 689 are.
    """
    core = make_engine(make_core, num_tokens=1100)
    core.add(make_request(A, 10, max_tokens=1000))
    run_step(core)
    run_step(core, num_decodes)
    core.add(make_request(B, 10, max_tokens=439))
    assert run_step(core)[0] == ({B: 10} if is_admitted else {A: 1})


def test_the_request_with_the_fewest_output_tokens_is_retracted_and_waits_behind_all(
    make_core, make_request, run_step
):
    core = make_engine(make_core, num_tokens=30, schedule_conservativeness=0.1)
    core.add(make_request(A, 6, max_tokens=20))
    run_step(core)
    run_step(core)
    core.add(make_request(B, 7, max_tokens=12))
    assert run_step(core)[0] == {B: 7}
    core.add(make_request(C, 7, max_tokens=12))
    while not (plan := core.plan(0.0)).preempted:
        core.commit(plan, StepOutcome(), 0.0)
    assert [seq.request_id for seq in plan.preempted] == [B]
    assert plan.tokens_by_request == {A: 1}
    assert [seq.request_id for seq in core.view.waiting] == [C, B]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0: must be >= 1"),
        ({"max_prefill_tokens": 0}, "max_prefill_tokens=0: must be >= 1"),
        ({"schedule_conservativeness": 0.0}, "schedule_conservativeness=0.0: must be a finite number > 0"),
        ({"mixed_chunk": True, "enable_chunked_prefill": False}, "mixed_chunk=true: must be false where"),
    ],
)
def test_wrong_settings_are_named(settings, named):
    with pytest.raises(ValueError, match=named):
        Sglang(**settings)
