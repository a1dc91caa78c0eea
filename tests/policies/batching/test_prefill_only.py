"""A prefill worker: prompts, pauses, and the transfer of KV to other replicas."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.batching.disaggregated import PrefillOnly
from policies.core.plan import StepOutcome
from policies.core.sequence import SequenceState

A, B, C = range(3)


def test_a_sequence_stands_still_from_its_first_token_on(make_core, make_request, run_step):
    """B asks for one token and ends. A waits, with its KV, to be taken over; then there is room for C."""
    core = make_core(batching=PrefillOnly(), num_blocks=4)
    core.add(make_request(A, 8), stop_after=5)
    core.add(make_request(B, 4), stop_after=1)
    core.add(make_request(C, 13), stop_after=5)
    assert run_step(core)[0] == {A: 8, B: 4}
    assert core.plan(0.0) is None
    assert core.wake_s == inf, "nothing but an event from outside helps"
    assert core.find(A).state is SequenceState.paused
    assert core.find(A).num_output_tokens == 1
    assert core.block_pool.num_used == 2
    core.abort(A)
    assert run_step(core)[0] == {C: 13}


def test_prompts_are_whole_but_for_one_above_the_budget(make_core, make_request, run_step):
    core = make_core(batching=PrefillOnly(max_num_batched_tokens=8))
    for request_id, prompt in [(A, 5), (B, 4), (C, 9)]:
        core.add(make_request(request_id, prompt), stop_after=1)
    assert [run_step(core)[0] for _ in range(4)] == [{A: 5}, {B: 4}, {C: 8}, {C: 1}]


prompts = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 5)), min_size=1, max_size=10)


@given(prompts=prompts, budget=st.integers(1, 32), num_blocks=st.integers(10, 30))
def test_leap_equals_step_with_a_worker_that_takes_sequences_over(
    make_core, make_request, prompts, budget, num_blocks
):
    """Whenever nothing can be computed, the sequence that was paused first is taken away."""

    def run_core(leap):
        core = make_core(batching=PrefillOnly(max_num_batched_tokens=budget), num_blocks=num_blocks)
        for request_id, (prompt, answer) in enumerate(prompts):
            core.add(make_request(request_id, prompt), stop_after=answer)
        decision_log = []
        while core.num_unfinished:
            plan = core.plan(0.0)
            if plan is None:
                taken = next(iter(core.paused))
                decision_log.append(taken)
                core.abort(taken)
                continue
            num_iterations = plan.horizon if leap else 1
            assert plan.num_tokens <= budget
            assert not plan.num_decodes
            assert not plan.preempted
            decision_log += [plan.tokens_by_request] * num_iterations
            core.commit(plan, StepOutcome(num_iterations), 0.0)
            core.check_integrity()
        return decision_log

    assert run_core(leap=True) == run_core(leap=False)


def test_rejects_a_budget_below_one_token():
    with pytest.raises(ValueError, match="max_num_batched_tokens=0: must be >= 1"):
        PrefillOnly(max_num_batched_tokens=0)
