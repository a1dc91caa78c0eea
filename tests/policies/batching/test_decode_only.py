"""A decode worker: sequences with KV decode, others wait; KV that it lost itself is recomputed."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.batching.disaggregated import DecodeOnly
from policies.core.plan import StepOutcome

A, B, C = range(3)


def test_only_a_sequence_with_its_kv_is_admitted(make_core, make_request, run_step):
    """The pool has all full blocks of a prompt but the last token: of 5 tokens it has 4, of 4 none."""
    core = make_core(batching=DecodeOnly(), presume_cached=True)
    core.add(make_request(A, 4), stop_after=2)
    core.add(make_request(B, 5), stop_after=3)
    assert [run_step(core)[0] for _ in range(3)] == [{B: 1}] * 3
    assert core.plan(0.0) is None
    assert core.wake_s == inf, "A waits for its KV to come"


def test_what_was_preempted_here_is_recomputed_here(make_core, make_request, run_out):
    """Four blocks of 4. Both hold two; at 8 tokens each needs a third, and B loses its KV.

    When A has ended, B, with 9 known tokens, finds the first 4 of its prompt again and computes 5.
    """
    core = make_core(batching=DecodeOnly(), presume_cached=True, num_blocks=4)
    core.add(make_request(A, 5), stop_after=5)
    core.add(make_request(B, 5), stop_after=6)
    assert run_out(core) == [
        *[({A: 1, B: 1}, [], 4)] * 4,
        ({A: 1}, [B], 3),
        ({B: 5}, [], 3),
        ({B: 1}, [], 3),
    ]


lengths = st.lists(st.tuples(st.sampled_from([5, 9, 13, 17, 4]), st.integers(1, 30)), min_size=1, max_size=10)


@given(lengths=lengths, budget=st.integers(1, 16), num_blocks=st.integers(12, 20))
def test_leap_equals_step(make_core, make_request, lengths, budget, num_blocks):
    def run_core(leap):
        core = make_core(
            batching=DecodeOnly(max_num_batched_tokens=budget), presume_cached=True, num_blocks=num_blocks
        )
        for request_id, (prompt, answer) in enumerate(lengths):
            core.add(make_request(request_id, prompt), stop_after=answer)
        decision_log = []
        while (plan := core.plan(0.0)) is not None:
            num_iterations = plan.horizon if leap else 1
            assert plan.num_tokens <= budget
            decision_log += [plan.tokens_by_request] * num_iterations
            core.commit(plan, StepOutcome(num_iterations), 0.0)
            core.check_integrity()
        left = {seq.request_id for seq in core.waiting}
        assert left == {i for i, (prompt, _) in enumerate(lengths) if prompt == 4}, "none of these has KV"
        return decision_log

    assert run_core(leap=True) == run_core(leap=False)


def test_rejects_a_budget_below_one_token():
    with pytest.raises(ValueError, match="max_num_batched_tokens=0: must be >= 1"):
        DecodeOnly(max_num_batched_tokens=0)
