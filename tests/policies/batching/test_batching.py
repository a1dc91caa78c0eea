"""Batching policies against schedules worked out on paper, and what a policy is allowed to read."""

from dataclasses import dataclass

import pytest

from policies.batching.chunked import Chunked
from policies.batching.static import Static
from policies.batching.whole_prompts import PrefillFirst
from policies.core.sequence import Sequence, SequenceView
from policies.core.view import StepView

A, B, C, D = range(4)


def test_chunked_follows_the_schedule_worked_out_on_paper(make_core, make_request, run_out):
    """Budget 6, five blocks of 4 tokens. A: prompt 5, answer 6. B: 6, 4. C: 3, 3. All arrive together.

    n>m: tokens in KV before and after the step; (k): blocks held after it; *: a token comes out.

    step  A            B            C            blocks
    0     0>5  (2)*    0>1  (1)     budget gone  3
    1     5>6  (2)*    1>6  (2)*    budget gone  4
    2     6>7  (2)*    6>7  (2)*    0>3  (1)*    5
    3     7>8  (2)*    7>8  (2)*    3>4  (1)*    5
    4     8>9  (3)*    preempted    preempted    3   all need a block: A takes C's, B is the last come itself
    5     9>10 (3)*    needs 3      behind B     3   two blocks are free: B, 9 known tokens, waits; A ends
    6                  0>6  (2)     budget gone  2   B recomputes prompt and answer
    7                  6>9  (3)*    0>3  (1)     4   B ends with the token that the last chunk yields
    8                               3>5  (2)*    2   C ends
    """
    core = make_core(batching=Chunked(max_num_batched_tokens=6), num_blocks=5)
    core.add(make_request(A, 5), stop_after=6)
    core.add(make_request(B, 6), stop_after=4)
    core.add(make_request(C, 3), stop_after=3)
    assert run_out(core) == [
        ({A: 5, B: 1}, [], 3),
        ({A: 1, B: 5}, [], 4),
        ({A: 1, B: 1, C: 3}, [], 5),
        ({A: 1, B: 1, C: 1}, [], 5),
        ({A: 1}, [C, B], 3),
        ({A: 1}, [], 3),
        ({B: 6}, [], 2),
        ({B: 3, C: 3}, [], 4),
        ({C: 2}, [], 2),
    ]


def test_prefill_first_follows_the_schedule_worked_out_on_paper(make_core, make_request, run_out):
    """Prefill budget 8, six blocks of 4 tokens. A: prompt 5, answer 4. B: 4, 3. C: 9, 2.

    step  A           B           C           blocks
    0     0>5 (2)*    5+4 > 8                 2
    1     stalls      0>4 (1)*    4+9 > 8     3
    2     stalls      stalls      0>8 (2)     5   longer than the budget: split
    3     stalls      stalls      8>9 (3)*    6
    4     5>6 (2)*    4>5 (2)*    preempted   4   B needs a block
    5     6>7 (2)*    5>6 (2)*    needs 3     4   C, 10 known tokens, finds two blocks free; B ends
    6     stalls                  0>8 (2)     4
    7     stalls                  8>10 (3)*   5   C ends
    8     7>8 (2)*                            2   A ends
    """
    core = make_core(batching=PrefillFirst(max_num_batched_tokens=8), num_blocks=6)
    core.add(make_request(A, 5), stop_after=4)
    core.add(make_request(B, 4), stop_after=3)
    core.add(make_request(C, 9), stop_after=2)
    assert run_out(core) == [
        ({A: 5}, [], 2),
        ({B: 4}, [], 3),
        ({C: 8}, [], 5),
        ({C: 1}, [], 6),
        ({A: 1, B: 1}, [C], 4),
        ({A: 1, B: 1}, [], 4),
        ({C: 8}, [], 4),
        ({C: 2}, [], 5),
        ({A: 1}, [], 2),
    ]


def test_static_follows_the_schedule_worked_out_on_paper(make_core, make_request, run_out):
    """Batches of two. A: prompt 4, answer 3. B: 3, 2. C: 2, 1. D: 5, 2.

    step  A      B      C      D      blocks
    0     0>4*   0>3*                 2
    1     4>5*   3>4*                 3   B ends; its place stays empty
    2     5>6*                        2   A ends
    3                   0>2*   0>5*   3   C ends
    4                          5>6*   2   D ends
    """
    core = make_core(batching=Static(batch_size=2))
    for request_id, prompt, answer in [(A, 4, 3), (B, 3, 2), (C, 2, 1), (D, 5, 2)]:
        core.add(make_request(request_id, prompt), stop_after=answer)
    assert run_out(core) == [
        ({A: 4, B: 3}, [], 2),
        ({A: 1, B: 1}, [], 3),
        ({A: 1}, [], 2),
        ({C: 2, D: 5}, [], 3),
        ({D: 1}, [], 2),
    ]


def test_a_static_batch_holds_as_many_prompts_as_the_budget(make_core, make_request, run_out):
    """Budget 6. A: prompt 9, answer 1: alone, split. B: 3, 2 and C: 3, 1: together. D: 1, 1 is the third."""
    core = make_core(batching=Static(batch_size=2, max_num_batched_tokens=6))
    for request_id, prompt, answer in [(A, 9, 1), (B, 3, 2), (C, 3, 1), (D, 1, 1)]:
        core.add(make_request(request_id, prompt), stop_after=answer)
    tokens = [step[0] for step in run_out(core)]
    assert tokens == [{A: 6}, {A: 3}, {B: 3, C: 3}, {B: 1}, {D: 1}]


def test_chunked_admits_only_if_the_whole_prompt_can_get_blocks(make_core, make_request, run_step):
    """Three free blocks hold the first chunk of B, not its 13 tokens; no request overtakes it."""
    core = make_core(batching=Chunked(max_num_batched_tokens=8), num_blocks=4)
    core.add(make_request(A, 4), stop_after=9)
    core.add(make_request(B, 13), stop_after=1)
    core.add(make_request(C, 1), stop_after=1)
    assert run_step(core)[0] == {A: 4}
    assert run_step(core)[0] == {A: 1}
    core.abort(B)
    assert run_step(core)[0] == {A: 1, C: 1}


def test_chunked_leaves_decodes_beyond_the_budget_idle(make_core, make_request, run_step):
    budgets = iter([64, 2])  # the budget shrinks under running sequences

    def shrink(view, step):
        Chunked(max_num_batched_tokens=next(budgets)).fill(view, step, 0.0)

    core = make_core(batching=shrink)
    for request_id in (A, B, C):
        core.add(make_request(request_id, 1))
    run_step(core)
    plan = core.plan(0.0)
    assert plan.tokens_by_request == {A: 1, B: 1}
    assert [seq.request_id for seq in plan.idle] == [C]
    assert (plan.num_decodes, plan.num_decode_context_tokens, plan.horizon) == (2, 4, 1)


@pytest.mark.parametrize("policy", [Chunked, PrefillFirst, Static])
def test_rejects_a_budget_below_one_token(policy):
    with pytest.raises(ValueError, match="max_num_batched_tokens=0: must be >= 1"):
        policy(max_num_batched_tokens=0)


def test_rejects_a_batch_below_one_sequence():
    with pytest.raises(ValueError, match="batch_size=0: must be >= 1"):
        Static(batch_size=0)


def public_values(thing):
    """Returns what a policy may read of a view, a step or a sequence, by name."""
    shown = SequenceView if isinstance(thing, Sequence) else thing
    names = [name for name in dir(shown) if not name.startswith("_") and name != "num_predicted_tokens"]
    values = {name: getattr(thing, name) for name in names}
    return {name: value for name, value in values.items() if not callable(value)}


def described(value):
    """Returns a value without the identity of objects: sequences become their public values."""
    if isinstance(value, Sequence | StepView):
        return {name: described(v) for name, v in public_values(value).items() if name != "request"}
    if isinstance(value, list | tuple) or hasattr(value, "__iter__"):
        return [described(v) for v in value] if not isinstance(value, str) else value
    return value


def test_a_policy_cannot_see_when_an_answer_will_end(make_core, make_request, run_step):
    """Two engines that differ only in the true lengths show a policy the same until the first end."""

    def seen_with(answers):
        seen = []

        def look(view, step):
            seen.append((described(view), described(list(public_values(step).items()))))
            Chunked(max_num_batched_tokens=6).fill(view, step, 0.0)

        core = make_core(batching=look, num_blocks=9)
        for request_id, answer in enumerate(answers):
            core.add(make_request(request_id, 5), stop_after=answer)
        for _ in range(8):
            run_step(core)
        return seen

    assert seen_with([20, 30, None]) == seen_with([9, 8, 1000])
    assert seen_with([20, 30, None]) != seen_with([9, 3, 1000])


def test_a_policy_is_not_asked_about_steps_that_it_leaves_to_the_core(make_core, make_request, run_step):
    """Asked for the prompts, for the step that exceeds its number, and when something has come."""
    asked = []

    @dataclass(frozen=True)
    class Lazy:
        max_unasked_decodes = 2

        def fill(self, view, step, now):
            asked.append([seq.request_id for seq in view.decoding])
            Chunked().fill(view, step, now)

    core = make_core(batching=Lazy())
    for request_id in (A, B):
        core.add(make_request(request_id, 1))
    run_step(core)
    for _ in range(3):
        assert run_step(core)[0] == {A: 1, B: 1}
    assert asked == [[]]
    core.add(make_request(C, 1))
    run_step(core)
    run_step(core)
    assert asked == [[], [A, B], [A, B, C]]


@pytest.mark.parametrize("limit", [-1, 2.5, "8", None, True])
def test_a_declaration_that_is_no_number_of_sequences_is_refused(make_core, limit):
    class Mistaken(Chunked):
        max_unasked_decodes = limit

    with pytest.raises(ValueError, match=r"batching=mistaken: its max_unasked_decodes=.* must be a whole"):
        make_core(batching=Mistaken())
