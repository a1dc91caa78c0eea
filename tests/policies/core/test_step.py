"""The methods of a step: what they grant, what they refuse, and which calls are mistakes of a policy."""

import subprocess
import sys
from enum import Enum
from pathlib import Path

import pytest

from policies.batching.chunked import Chunked
from policies.core.plan import StepOutcome
from policies.core.request import Branching
from policies.core.sequence import SequenceState, SequenceView


@pytest.fixture
def begun(make_core, make_request, run_step):
    """Returns begun(script, **settings), an engine whose next step the script fills.

    Request 0 decodes, 1 is in prefill with 1 of 5 tokens computed, and 2 waits. The script is called with
    (step, decoding, prefilling, waiting).
    """

    def begin(script, **settings):
        core = make_core(batching=Chunked(max_num_batched_tokens=6), **settings)
        seqs = [core.add(make_request(request_id, 5)) for request_id in range(3)]
        run_step(core)
        states = [SequenceState.decoding, SequenceState.prefilling, SequenceState.waiting]
        assert [seq.state for seq in seqs] == states
        core.batching = make_core(batching=lambda view, step: script(step, *seqs)).batching
        return core

    return begin


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda step, d, p, w: step.decode(w), "cannot decode: not decoding"),
        (lambda step, d, p, w: step.decode(p), "cannot decode: not decoding"),
        (lambda step, d, p, w: step.decode(d) and step.decode(d), "decoded in this step already"),
        (lambda step, d, p, w: step.decode_all() and step.decode(d), "decoded in this step already"),
        (lambda step, d, p, w: step.prefill(d, 1), "cannot continue its prefill: not in prefill"),
        (lambda step, d, p, w: step.prefill(w, 1), "cannot continue its prefill: not in prefill"),
        (lambda step, d, p, w: step.prefill(p, 1) and step.prefill(p, 1), "has a chunk in this step already"),
        (lambda step, d, p, w: step.admit(w, 1) and step.prefill(w, 1), "has a chunk in this step already"),
        (lambda step, d, p, w: step.preempt(w), "cannot be preempted: it must be"),
        (
            lambda step, d, p, w: step.admit(w, 1) and step.admit(w, 1),
            "cannot be admitted: it is not waiting",
        ),
        (lambda step, d, p, w: step.admit(d, 1), "cannot be admitted: it is not waiting"),
    ],
)
def test_rejects_a_verb_that_does_not_fit_the_sequence(begun, misuse, message):
    core = begun(misuse)
    with pytest.raises(ValueError, match=message):
        core.plan(0.0)


def test_a_budget_is_never_exceeded(begun):
    def greedy(step, decoding, prefilling, waiting):
        step.budget(4)
        assert step.admit(waiting, 2)
        assert step.prefill(prefilling, 99)
        assert step.tokens_left == 0
        assert not step.decode(decoding)
        step.decode_all()

    plan = begun(greedy).plan(0.0)
    assert plan.tokens_by_request == {1: 2, 2: 2}
    assert plan.num_tokens == 4


def test_tokens_are_cut_to_what_is_left_of_a_prompt(begun):
    def greedy(step, decoding, prefilling, waiting):
        step.prefill(prefilling, 99)
        step.admit(waiting, 99)

    plan = begun(greedy).plan(0.0)
    assert plan.tokens_by_request == {1: 4, 2: 5}
    assert [chunk.completes for chunk in plan.chunks] == [True, True]


def test_a_step_that_preempted_admits_no_request(begun):
    def script(step, decoding, prefilling, waiting):
        step.preempt(prefilling)
        assert not step.admit(waiting, 1)
        assert not step.admit(prefilling, 1)
        step.decode(decoding)

    plan = begun(script).plan(0.0)
    assert (plan.admitted, [seq.request_id for seq in plan.preempted]) == ([], [1])


def test_admission_leaves_the_watermark_free_and_decodes_may_use_it(begun):
    """0 and 1 hold three blocks, the newcomer needs two, three are the watermark. Eight blocks are enough for
    that, seven are not, although four are free; for a decode they are.
    """

    def script(step, decoding, prefilling, waiting):
        assert step.admit(waiting, 5)

    assert begun(script, num_blocks=8, watermark=0.4).plan(0.0)

    def refused(step, decoding, prefilling, waiting):
        assert not step.admit(waiting, 1)
        assert step.decode(decoding)

    assert begun(refused, num_blocks=7, watermark=0.5).plan(0.0)


def test_preempting_gives_the_tokens_of_this_step_back(begun):
    def script(step, decoding, prefilling, waiting):
        step.budget(6)
        step.decode_all()
        step.prefill(prefilling, 3)
        step.preempt(decoding)
        assert (step.num_tokens, step.tokens_left) == (3, 3)
        step.preempt(prefilling)
        assert (step.num_tokens, step.tokens_left) == (0, 6)
        raise InterruptedError

    core = begun(script)
    with pytest.raises(InterruptedError):
        core.plan(0.0)
    assert core.block_pool.num_free == core.block_pool.num_blocks
    core.check_integrity()


def test_a_loop_over_the_view_survives_preemptions(make_core, make_request, run_step):
    """The simplest policy looks at no state. Three blocks, all taken; 0 needs another, so 2 must go before
    its turn comes. Then two prompts begun together: the first outgrows the free blocks.
    """

    def plain(view, step):
        for seq in view.decoding:
            step.decode(seq)
        for seq in view.prefilling:
            step.prefill(seq, 3)
        for seq in view.waiting:
            step.admit(seq, 3)

    core = make_core(batching=plain, num_blocks=3)
    for request_id, num_prompt_tokens in enumerate([3, 2, 2]):
        core.add(make_request(request_id, num_prompt_tokens))
    assert [run_step(core)[0] for _ in range(3)] == [{0: 3, 1: 2, 2: 2}, {0: 1, 1: 1, 2: 1}, {0: 1, 1: 1}]

    core = make_core(batching=plain, num_blocks=4)
    for request_id in range(2):
        core.add(make_request(request_id, 12))
    assert [run_step(core)[0] for _ in range(3)] == [{0: 3, 1: 3}, {0: 3, 1: 3}, {0: 3}]


def test_a_policy_without_a_promise_holds_for_one_iteration(begun):
    assert begun(lambda step, d, p, w: step.decode_all()).plan(0.0).horizon == 1


def test_a_promise_may_be_short(begun):
    def script(step, decoding, prefilling, waiting):
        step.decode_all()
        step.repeat(7)

    assert begun(script).plan(0.0).horizon == 7


@pytest.mark.parametrize(
    ("settings", "num_prompt_tokens", "answer", "horizon"),
    [
        ({}, 6, 9, 8),  # the end: one token came with the prefill
        ({"max_model_len": 10}, 6, None, 3),  # the context: 10 known tokens, 7 of them known
        ({"num_blocks": 4}, 6, None, 10),  # the cache: 16 tokens of KV
    ],
)
def test_horizon_ends_with_the_sequence(
    make_core, make_request, run_step, settings, num_prompt_tokens, answer, horizon
):
    core = make_core(**settings)
    core.add(make_request(0, num_prompt_tokens), stop_after=answer)
    run_step(core)
    assert core.plan(0.0).horizon == horizon


def test_horizon_ends_before_a_block_is_missing(make_core, make_request, run_step):
    """Five blocks; prompts of 4 and 6 hold 1 + 2. The first needs a block at once, then both have room: the
    second needs one in 3 iterations' time, and the first again in 5, when none is left.
    """
    core = make_core(num_blocks=5)
    core.add(make_request(0, 4))
    core.add(make_request(1, 6))
    run_step(core)
    plan = core.plan(0.0)
    assert plan.horizon == 4
    assert [core.blocks_of_repeats(plan, repeats) for repeats in range(5)] == [0, 0, 1, 1, 2]


def test_the_chunk_that_completes_a_prompt_is_a_step_of_its_own(make_core, make_request):
    """20 tokens by 6: three alike, then two."""
    core = make_core(batching=Chunked(max_num_batched_tokens=6))
    core.add(make_request(0, 20))
    assert core.plan(0.0).horizon == 3
    core = make_core(batching=Chunked(max_num_batched_tokens=6))
    core.add(make_request(0, 18))
    assert core.plan(0.0).horizon == 2


def test_view_counts_what_the_step_has_done_so_far(begun):
    def script(step, decoding, prefilling, waiting):
        core_view = core.view
        assert (core_view.num_decoding, core_view.num_running, core_view.num_waiting) == (1, 2, 1)
        assert (list(core_view.decoding), list(core_view.prefilling)) == ([decoding], [prefilling])
        assert list(core_view.waiting) == [waiting]
        free = core_view.num_free_blocks
        step.admit(waiting, 5)
        assert (core_view.num_running, core_view.num_waiting) == (3, 0)
        assert core_view.num_free_blocks == free - 2

    core = begun(script)
    core.plan(0.0)


@pytest.mark.parametrize("num_iterations", [0, -3, 2.5])
def test_rejects_a_promise_that_is_no_number_of_iterations(make_core, make_request, num_iterations):
    def promise(view, step):
        step.repeat(num_iterations)

    core = make_core(batching=promise)
    core.add(make_request(0, 4))
    message = (
        rf"repeat\({num_iterations}\): must be a whole number|int object expected"  # the latter compiled
    )
    with pytest.raises((ValueError, TypeError), match=message):
        core.plan(0.0)


def test_a_builder_is_good_for_one_step_only(make_core, make_request):
    kept = []

    def keep(view, step):
        kept.append((step, list(view.waiting)))
        Chunked().fill(view, step, 0.0)

    core = make_core(batching=keep)
    core.add(make_request(0, 4), stop_after=5)
    core.add(make_request(1, 4), stop_after=5)
    plan = core.plan(0.0)
    step, waiting = kept[0]
    for verb in (lambda: step.admit(waiting[0], 4), step.decode_all, lambda: step.preempt(waiting[1])):
        with pytest.raises(ValueError, match="this step has ended"):
            verb()
    core.commit(plan, StepOutcome(), 0.0)
    core.check_integrity()


def test_a_policy_that_admits_and_preempts_for_ever_is_stopped(make_core, make_request):
    def dither(view, step):
        for seq in list(view.waiting):
            if step.admit(seq, 10):
                step.preempt(seq)

    core = make_core(batching=dither)
    core.add(make_request(0, 4))
    with pytest.raises(RuntimeError, match=r"fill scheduled nothing with 1 waiting .* it must"):
        core.plan(0.0)


def test_a_policy_cannot_change_a_request(make_core, make_request):
    seq = make_core().add(make_request(0, 4))
    with pytest.raises(AttributeError):
        seq.request.arrival_s = 5.0


def test_a_policy_is_shown_a_sequence_that_it_cannot_change():
    """Type checkers reject a write to a property without a setter; all that a policy is shown is one."""
    shown = {name: value for name, value in vars(SequenceView).items() if not name.startswith("_")}
    assert {"state", "rank", "slot", "request", "num_computed"} <= shown.keys()
    assert all(isinstance(value, property) and value.fset is None for value in shown.values())


@pytest.mark.parametrize("width", [1, 3])
def test_all_that_can_be_read_of_a_sequence_is_the_same_whatever_its_true_end(make_core, make_request, width):
    """Its public attributes, and those of its branches, in engines that know of ends after 4, 9 and 20."""

    def readable(stop_after):
        core = make_core()
        branching = None if width == 1 else Branching(width)
        seq = core.add(make_request(0, 4, max_tokens=20, branching=branching), stop_after)
        seen = []
        for now in range(4):
            seen.append({name: value for part in (seq, seq.branches) for name, value in plain(part).items()})
            core.commit(core.plan(float(now)), StepOutcome(1), now + 0.5)
        return seen

    def plain(part):
        names = {name for name in dir(part) if not name.startswith("_")} - {"num_predicted_tokens"}
        public = {name: getattr(part, name) for name in names}
        return {name: value for name, value in public.items() if isinstance(value, int | tuple | list | Enum)}

    short, long, longest = readable(4), readable(9), readable(None)
    assert {"state", "num_known", "slots", "request"} <= short[0].keys()
    assert short == long == longest


@pytest.mark.slow
def test_a_type_checker_rejects_a_policy_that_writes_to_a_sequence(tmp_path):
    policy = tmp_path / "writing.py"
    policy.write_text(
        "from policies.core.sequence import SequenceView\n"
        "def rank(seq: SequenceView) -> tuple[float, ...]:\n"
        "    seq.rank = ()\n"
        "    return ()\n"
    )
    command = [sys.executable, "-m", "mypy", "--no-incremental", str(policy)]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert 'Property "rank" defined in "SequenceView" is read-only' in done.stdout
