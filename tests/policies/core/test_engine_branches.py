"""A request with several answers in the engine: blocks, slots and budget, ends and preemption."""

import pytest

from policies.caching.contiguous import Contiguous
from policies.caching.pool import KvMemory
from policies.core.engine import EngineCore
from policies.core.limits import RejectedError
from policies.core.plan import StepOutcome
from policies.core.request import Branching
from policies.core.sequence import FinishReason, SequenceState
from policies.scheduling.fcfs import Fcfs


def add(
    core, make_request, request_id=0, num_prompt_tokens=6, width=3, every=None, stop_after=None, **settings
):
    branching = Branching(width, every)
    request = make_request(request_id, num_prompt_tokens, branching=branching, **settings)
    return core.add(request, stop_after)


def test_three_samples_of_six_tokens_in_blocks_of_four(make_core, make_request):
    """Prompt: 2 blocks. The first tokens share the second, which is then copied twice: 1 + 3. Two tokens on,
    each has filled its own and takes a new one: 1 + 6.
    """
    core = make_core()
    seq = add(core, make_request, stop_after=5)
    used = []
    while (plan := core.plan(0.0)) is not None:
        used.append(
            (plan.tokens_by_request[0], core.block_pool.num_used, plan.num_copied_tokens, plan.horizon)
        )
        core.commit(plan, StepOutcome(), 0.0)
        core.check_integrity()
    assert used == [(6, 2, 0, 1), (3, 4, 4, 1), (3, 4, 0, 1), (3, 7, 0, 1), (3, 7, 0, 1)]
    assert (seq.num_output_tokens, seq.num_emitted_tokens, seq.finish_reason) == (5, 15, FinishReason.stop)
    assert (core.block_pool.num_used, core.block_pool.num_extra_blocks, sorted(core.free_slots)) == (
        0,
        0,
        list(range(8)),
    )


def test_samples_end_one_by_one_and_free_what_only_they_held(make_core, make_request, run_step):
    core = make_core()
    seq = add(core, make_request, stop_after=(1, 4, 2))
    run_step(core)
    assert (seq.width, len(core.free_slots)) == (2, 6)
    assert run_step(core)[0] == {0: 2}
    assert (seq.width, len(core.free_slots), core.block_pool.num_used) == (1, 7, 2)
    run_step(core)
    _, (_, finished) = run_step(core)
    assert finished == [seq]
    assert seq.num_emitted_tokens == 1 + 4 + 2


def test_a_plan_counts_every_branch(make_core, make_request, run_step):
    """Beside an ordinary sequence of 4 + 1 tokens: contexts of 5 and 3 times 7."""
    core = make_core()
    add(core, make_request, stop_after=9)
    core.add(make_request(1, 4), 9)
    run_step(core)
    plan = core.plan(0.0)
    assert (plan.num_decodes, plan.num_branches, plan.num_tokens, plan.num_widening) == (4, 3, 4, 4)
    assert plan.num_decode_context_tokens == 5 + 3 * 7
    assert [seq.request_id for seq in plan.decodes] == [0, 1]
    assert len(core.branched.copies(plan)) == 2


def test_the_budget_gives_all_branches_a_token_or_none(make_core, make_request, run_step):
    def script(view, step):
        step.budget(budget[0])
        step.decode_all()
        for seq in view.waiting:
            step.admit(seq, 99)

    budget = [99]
    core = make_core(batching=script)
    add(core, make_request, 1, stop_after=9)
    core.add(make_request(0, 4), 9)
    run_step(core)
    budget[0] = 3  # the ordinary one goes first, then 2 are too few
    assert run_step(core)[0] == {0: 1}
    budget[0] = 4
    assert run_step(core)[0] == {0: 1, 1: 3}


def test_the_world_chooses_the_branches_that_go_on(make_core, make_request, run_step):
    """Both beams continue the first: they share it, and the second's blocks are free."""
    core = make_core()
    add(core, make_request, num_prompt_tokens=4, width=2, every=1, stop_after=9)
    run_step(core)
    plan = core.plan(0.0)
    assert core.block_pool.num_used == 3
    core.commit(plan, StepOutcome(parents={0: (0, 0)}), 0.0)
    assert core.block_pool.num_used == 2
    plan = core.plan(0.0)
    with pytest.raises(ValueError, match=r"parents=\(0, 2\).*must name branches below 2"):
        core.commit(plan, StepOutcome(parents={0: (0, 2)}), 0.0)


@pytest.mark.parametrize("swap", [False, True])
def test_branches_are_preempted_as_one_and_come_back(make_core, make_request, run_step, swap):
    """After two decodes they store 4 + 3 * 4 tokens. Recomputed, that and the newest token of each: 19 at
    once; swapped, they go on where they were.
    """
    wishes = []

    def script(view, step):
        for seq in wishes:
            step.preempt(seq, swap=swap)
        if not wishes:
            step.decode_all()
            for seq in view.waiting:
                step.admit(seq, 99)
        wishes.clear()

    core = make_core(batching=script, num_swap_blocks=100)
    seq = add(core, make_request, stop_after=9)
    for _ in range(3):
        run_step(core)
    wishes.append(seq)
    plan = core.plan(0.0)
    core.take_transfers()
    if swap:
        assert plan is None
        core.loaded(0)
        assert run_step(core)[0] == {0: 3}
        assert seq.num_output_tokens == 4
    else:
        assert plan.tokens_by_request == {0: 19}
        core.commit(plan, StepOutcome(), 0.0)
        assert (seq.num_output_tokens, seq.num_emitted_tokens) == (4, 12)
        assert core.block_pool.num_used == 1 + 2 * 3
    core.check_integrity()
    while core.num_unfinished:
        run_step(core)
    assert seq.num_emitted_tokens == 27
    assert (core.block_pool.num_used, core.block_pool.num_extra_blocks, core.num_free_swap_blocks) == (
        0,
        0,
        100,
    )


def test_alone_in_a_small_cache_they_end_where_it_is_full(make_core, make_request, run_out):
    """7 blocks of 4: the prompt's full one, and two for each of three: 2 + 6 tokens of each are there."""
    core = make_core(num_blocks=7)
    seq = add(core, make_request)
    run_out(core)
    assert (seq.finish_reason, seq.num_output_tokens) == (FinishReason.length, 7)


def test_paused_branches_keep_what_they_have(make_core, make_request, run_step):
    def script(view, step):
        for seq in [*view.decoding, *view.paused]:
            if seq.request_id == 0 and pausing[0]:
                (step.pause if seq.state is SequenceState.decoding else step.resume)(seq)
        step.decode_all()
        for seq in view.waiting:
            step.admit(seq, 99)

    pausing = [False]
    core = make_core(batching=script)
    add(core, make_request, stop_after=9)
    core.add(make_request(1, 4), 9)
    run_step(core)
    pausing[0] = True
    assert run_step(core)[0] == {1: 1}
    assert run_step(core)[0] == {0: 3, 1: 1}
    core.check_integrity()


def test_what_can_never_be_served_is_rejected(make_core, make_request):
    with pytest.raises(RejectedError, match="9 branches: max_num_seqs is 8"):
        add(make_core(), make_request, width=9)
    with pytest.raises(RejectedError, match=r"branching.width=0, branching.every=None: must be >= 1"):
        add(make_core(), make_request, width=0)
    with pytest.raises(ValueError, match=r"stop_after=\(1, 2\): must be 3 numbers >= 1"):
        add(make_core(), make_request, stop_after=(1, 2))
    core = make_core()
    pool = Contiguous(block_size=4).pool(KvMemory(100, 1.0, max_model_len=64))
    core = EngineCore(
        batching=core.batching, scheduling=Fcfs(), block_pool=pool, max_num_seqs=8, max_model_len=64
    )
    with pytest.raises(RejectedError, match="cannot share KV between them"):
        add(core, make_request)
