"""Dynamic SplitFuse against schedules worked out on paper."""

import pytest

from policies.batching.splitfuse import SplitFuse

A, B, C = range(3)


def test_every_pass_is_composed_to_the_same_size(make_core, make_request, run_out):
    """Size 6. A: prompt 8, answer 3. B: 3, 2. C: 6, 1: split where the size is reached, short as it is."""
    core = make_core(batching=SplitFuse(max_num_batched_tokens=6))
    for request_id, prompt, answer in [(A, 8, 3), (B, 3, 2), (C, 6, 1)]:
        core.add(make_request(request_id, prompt), stop_after=answer)
    assert [step[0] for step in run_out(core)] == [
        {A: 6},
        {A: 2, B: 3, C: 1},
        {A: 1, B: 1, C: 4},
        {A: 1, C: 1},
    ]


def test_a_decode_without_room_stalls_until_no_sequence_can_go_on(make_core, make_request, run_out):
    """Three blocks of 4, two prompts of 4, answers of 6; both need a second block at once.

    A gets it, B stalls for as long as A fills it. Then A needs a third: no sequence can go on, and both lose
    their KV. A's 9 known tokens take all three blocks and yield its last; B recomputes its 5 and goes on.
    """
    core = make_core(batching=SplitFuse(max_num_batched_tokens=16), num_blocks=3)
    core.add(make_request(A, 4), stop_after=6)
    core.add(make_request(B, 4), stop_after=6)
    assert run_out(core) == [
        ({A: 4, B: 4}, [], 2),
        *[({A: 1}, [], 3)] * 4,
        ({A: 9}, [A, B], 3),
        ({B: 5}, [], 2),
        *[({B: 1}, [], 2)] * 3,
        ({B: 1}, [], 3),
    ]


def test_a_begun_prompt_waits_until_all_of_its_rest_has_room(make_core, make_request, run_step):
    """Four blocks of 4, size 9. After step 0 A holds one block and B, with 5 of 12 tokens, two.

    A's next token takes the last block, and B's rest of 7 tokens, which needs one, waits until A is gone.
    """
    core = make_core(batching=SplitFuse(max_num_batched_tokens=9), num_blocks=4)
    core.add(make_request(A, 4), stop_after=9)
    core.add(make_request(B, 12), stop_after=1)
    assert run_step(core)[0] == {A: 4, B: 5}
    assert run_step(core)[0] == {A: 1}, "A took the block that B's rest would need"
    for _ in range(3):
        assert run_step(core)[0] == {A: 1}
    core.abort(A)
    assert run_step(core)[0] == {B: 7}


def test_rejects_a_pass_without_tokens():
    with pytest.raises(ValueError, match="max_num_batched_tokens=0: must be >= 1"):
        SplitFuse(max_num_batched_tokens=0)
