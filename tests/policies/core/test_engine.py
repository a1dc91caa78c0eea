"""Intake, ends, aborts and the contract of plan and commit."""

import pytest

from policies.batching.chunked import Chunked
from policies.core.limits import RejectedError
from policies.core.plan import Cause, StepOutcome
from policies.core.sequence import FinishReason, SequenceState


def answer_of(core, seq, run_step):
    """Steps until the sequence ends: its number of output tokens and why it ended."""
    while seq.state is not SequenceState.ended:
        run_step(core)
        core.check_integrity()
    return seq.num_output_tokens, seq.finish_reason


@pytest.mark.parametrize(
    ("settings", "num_prompt_tokens", "message"),
    [
        ({}, 0, "an empty prompt"),
        ({"max_model_len": 30}, 30, "prompt of 30 tokens: max_model_len is 30"),
        (
            {"num_blocks": 5, "block_size": 4},
            21,
            "prompt of 21 tokens: the KV cache holds at most 20 per sequence",
        ),
    ],
)
def test_rejects_a_prompt_that_can_never_be_served(
    make_core, make_request, settings, num_prompt_tokens, message
):
    core = make_core(**settings)
    with pytest.raises(RejectedError, match=message):
        core.add(make_request(0, num_prompt_tokens))
    assert core.num_unfinished == 0
    assert core.plan(0.0) is None


def test_rejects_a_wish_for_no_tokens(make_core, make_request):
    with pytest.raises(RejectedError, match="0 output tokens requested: must be >= 1"):
        make_core().add(make_request(0, max_tokens=0))


def test_rejects_a_request_id_that_is_being_served(make_core, make_request, run_step):
    core = make_core()
    core.add(make_request(7), stop_after=1)
    with pytest.raises(ValueError, match="request_id=7: is being served already"):
        core.add(make_request(7))
    run_step(core)
    core.add(make_request(7))  # the first has ended


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0: must be >= 1"),
        ({"max_model_len": 1}, "max_model_len=1: must be >= 2"),
    ],
)
def test_rejects_an_engine_that_can_serve_no_request(make_core, settings, message):
    with pytest.raises(ValueError, match=message):
        make_core(**settings)


@pytest.mark.parametrize(
    ("settings", "max_tokens", "true_length", "ends_with"),
    [
        ({}, None, 7, (7, FinishReason.stop)),
        ({}, None, 1, (1, FinishReason.stop)),
        ({}, 3, 7, (3, FinishReason.length)),
        ({}, 7, 7, (7, FinishReason.stop)),
        ({}, 3, None, (3, FinishReason.length)),
        ({"max_model_len": 9}, None, 7, (5, FinishReason.length)),
        # Two blocks of 4 hold the KV of 8 tokens; the 9th known token needs none, and is the last.
        ({"num_blocks": 2}, None, 7, (5, FinishReason.length)),
        ({"num_blocks": 2, "watermark": 0.5}, None, 7, (5, FinishReason.length)),  # alone, it may have all
    ],
)
def test_an_answer_ends_at_its_true_length_or_at_the_nearest_limit(
    make_core, make_request, run_step, settings, max_tokens, true_length, ends_with
):
    core = make_core(**settings)
    seq = core.add(make_request(0, 4, max_tokens=max_tokens), stop_after=true_length)
    assert answer_of(core, seq, run_step) == ends_with
    assert core.block_pool.num_free == core.block_pool.num_blocks


def test_the_world_may_end_a_sequence(make_core, make_request, run_step):
    """An engine that reads tokens knows of an end only when it sees it."""
    core = make_core()
    first, second = core.add(make_request(0)), core.add(make_request(1))
    run_step(core)
    _, (_, finished) = run_step(core, num_iterations=5, ended=[second])
    assert finished == [second]
    assert (second.finish_reason, second.num_output_tokens) == (FinishReason.stop, 6)
    assert first.num_output_tokens == 6
    assert list(core.unfinished) == [first]
    core.check_integrity()


def test_a_sequence_that_ends_by_itself_and_by_the_world_ends_once(make_core, make_request, run_step):
    core = make_core()
    seq = core.add(make_request(0), stop_after=1)
    _, (_, finished) = run_step(core, ended=[seq])
    assert finished == [seq]
    core.check_integrity()


def test_aborts_reach_every_state(make_core, make_request, run_step):
    """Budget 6, prompts of 5: after one step 0 decodes, 1 is in prefill, 2 waits."""
    core = make_core(batching=Chunked(max_num_batched_tokens=6), num_blocks=8)
    decoding, prefilling, waiting = (core.add(make_request(i, 5)) for i in range(3))
    run_step(core)
    states = [seq.state for seq in (decoding, prefilling, waiting)]
    assert states == [SequenceState.decoding, SequenceState.prefilling, SequenceState.waiting]
    for seq in (prefilling, waiting, decoding):
        assert core.abort(seq.request_id) is seq
        assert (seq.state, seq.finish_reason) == (SequenceState.ended, FinishReason.aborted)
        core.check_integrity()
    assert decoding.num_output_tokens == 1
    assert core.block_pool.num_free == 8
    assert core.plan(0.0) is None


def test_abort_of_a_preempted_sequence_keeps_its_tokens(make_core, make_request, run_step):
    core = make_core(num_blocks=2)
    core.add(make_request(0, 4))
    preempted = core.add(make_request(1, 4))
    run_step(core)
    run_step(core)
    assert (preempted.state, preempted.num_preemptions) == (SequenceState.waiting, 1)
    core.abort(1)
    assert preempted.num_output_tokens == 1
    core.check_integrity()


def test_abort_of_a_stranger_is_no_error(make_core):
    assert make_core().abort(5) is None


def test_a_plan_must_be_committed_before_anything_else(make_core, make_request):
    core = make_core()
    core.add(make_request(0))
    core.plan(0.0)
    with pytest.raises(RuntimeError, match="plan: a plan is in flight"):
        core.plan(0.0)
    with pytest.raises(RuntimeError, match="abort: a plan is in flight"):
        core.abort(0)
    with pytest.raises(RuntimeError, match="check_integrity: a plan is in flight"):
        core.check_integrity()
    core.add(make_request(1))  # requests may come at any time


def test_rejects_a_commit_of_another_plan_or_twice(make_core, make_request):
    core = make_core()
    core.add(make_request(0))
    old = core.plan(0.0)
    core.commit(old, StepOutcome(), 0.0)
    with pytest.raises(ValueError, match="must be of the plan in flight"):
        core.commit(old, StepOutcome(), 0.0)
    core.plan(0.0)
    with pytest.raises(ValueError, match="must be of the plan in flight"):
        core.commit(old, StepOutcome(), 0.0)


@pytest.mark.parametrize("num_iterations", [0, -1, 10])
def test_rejects_a_commit_beyond_the_horizon(make_core, make_request, run_step, num_iterations):
    core = make_core()
    core.add(make_request(0), stop_after=10)
    run_step(core)
    plan = core.plan(0.0)
    assert plan.horizon == 9
    with pytest.raises(ValueError, match=f"commit of {num_iterations} iterations"):
        core.commit(plan, StepOutcome(num_iterations), 0.0)
    core.commit(plan, StepOutcome(9), 0.0)  # the refusal changed nothing


def test_policies_that_schedule_nothing_are_stopped(make_core, make_request):
    core = make_core(batching=lambda view, step: None)
    core.add(make_request(0))
    with pytest.raises(RuntimeError, match="scheduled nothing with 1 waiting and 0 running"):
        core.plan(0.0)


def test_slots_are_reused_from_the_lowest(make_core, make_request, run_step):
    core = make_core(max_num_seqs=3)
    seqs = [core.add(make_request(i)) for i in range(3)]
    run_step(core)
    assert [seq.slot for seq in seqs] == [0, 1, 2]
    core.abort(1)
    assert seqs[1].slot is None
    newcomer = core.add(make_request(3))
    run_step(core)
    assert newcomer.slot == 1


def test_a_preempted_sequence_can_return_at_the_clock_at_which_it_left(make_core, make_request, run_step):
    """1 loses its KV in the last step of 0 and is recomputed in a step without decodes: one token on and one
    iteration of the decode set later, its end falls on the same iteration of the set as before.
    """
    core = make_core(num_blocks=2)
    core.add(make_request(0, 4), stop_after=2)
    seq = core.add(make_request(1, 4), stop_after=3)
    steps = [run_step(core)[0] for _ in range(4)]
    assert steps == [{0: 4, 1: 4}, {0: 1}, {1: 5}, {1: 1}]
    assert (seq.state, seq.num_output_tokens) == (SequenceState.ended, 3)
    core.check_integrity()


def test_rejects_a_clock_that_goes_backwards(make_core, make_request):
    core = make_core()
    core.add(make_request(0, 4))
    plan = core.plan(5.0)
    with pytest.raises(ValueError, match=r"now=4.0: must be >= the time of the last call, 5.0"):
        core.commit(plan, StepOutcome(), 4.0)
    core.commit(plan, StepOutcome(), 6.0)
    with pytest.raises(ValueError, match="now=nan: must be >= the time of the last call"):
        core.plan(float("nan"))


def swap_out_then_in(make_core, make_request, run_step):
    """Decodes requests 0 and 1; swaps 1 out in the second step, and it returns after the third."""

    def script(view, step):
        for seq in view.running:
            if seq.request_id == 1 and view.num_iterations == 1:
                step.preempt(seq, swap=True)
        step.decode_all()
        for seq in view.waiting:
            step.admit(seq, 99)

    core = make_core(batching=script)
    core.transfers.num_free_swap_blocks = 9
    core.add(make_request(0), stop_after=9)
    core.add(make_request(1), stop_after=9)
    for _ in range(3):
        run_step(core)
    return core


def test_a_request_aborted_between_its_transfer_and_the_next_plan_is_not_admitted(
    make_core, make_request, run_step
):
    core = swap_out_then_in(make_core, make_request, run_step)
    core.loaded(1)
    core.abort(1)
    assert core.plan(0.0).admitted == []


def test_a_preempted_sequence_says_what_it_lost_and_to_which_request(make_core, make_request, run_step):
    """Two answers need a second block each, and there is one: 0 takes it, and 1 can displace only itself. A
    preemption by the policy's own wish has no beneficiary.
    """
    core = make_core(num_blocks=3)
    seqs = [core.add(make_request(i), stop_after=9) for i in range(2)]
    run_step(core)
    run_step(core)
    assert [(seq.num_lost, seq.displaced_by) for seq in seqs] == [(0, None), (4, 1)]
    core = swap_out_then_in(make_core, make_request, run_step)
    assert (core.find(1).num_lost, core.find(1).displaced_by) == (4, None)


def test_without_work_the_core_says_why_requests_wait(make_core, make_request):
    def script(view, step):
        step.wait_until(5.0)

    core = make_core(batching=script)
    assert (core.plan(0.0), core.waits_for) == (None, None)
    core.add(make_request(0), stop_after=9)
    assert (core.plan(0.0), core.waits_for) == (None, Cause.policy)
