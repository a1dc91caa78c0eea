"""A sequence that goes on in another engine: its KV is copied, not computed again."""

import pytest

from policies.limits import RejectedError
from policies.plan import Migrant, StepOutcome, Transfer
from policies.request import Prompt, Request
from policies.sequence import FinishReason, SequenceState


def step(core):
    plan = core.plan(0.0)
    tokens = {} if plan is None else plan.tokens_by_request
    if plan is not None:
        core.commit(plan, StepOutcome(), 0.0)
    core.check_integrity()
    return tokens


def test_a_migrant_brings_its_kv_and_decodes_on(make_core, make_request):
    """10 prompt tokens and 3 of answer in one engine, the other 4 in the next: nothing is computed twice."""
    one, other = make_core(), make_core()
    seq = one.add(make_request(5, 10), stop_after=7)
    assert [step(one) for _ in range(3)] == [{5: 10}, {5: 1}, {5: 1}]
    migrant = one.export(5)
    assert migrant == Migrant(seq.request, 13, 12)
    assert (seq.finish_reason, one.pool.num_free, one.num_unfinished) == (FinishReason.migrated, 100, 0)
    arrived = other.adopt(migrant, stop_after=7)
    assert other.plan(0.0) is None
    assert other.take_transfers() == [Transfer(arrived, "remote", "gpu", 12)]
    assert arrived.state is SequenceState.loading
    other.loaded(5)
    assert [step(other) for _ in range(5)] == [{5: 1}] * 4 + [{}]
    assert (arrived.finish_reason, arrived.num_output_tokens) == (FinishReason.stop, 7)
    assert other.pool.num_free == 100


def test_a_prefill_migrates_with_what_it_has(make_core, make_request):
    from_budget = make_core(batching=lambda view, step: _chunk(view, step, 4))
    from_budget.add(make_request(0, 10))
    step(from_budget)
    migrant = from_budget.export(0)
    assert (migrant.num_known, migrant.num_computed) == (10, 4)
    other = make_core()
    other.adopt(migrant)
    other.plan(0.0)
    other.loaded(0)
    assert step(other) == {0: 6}


def _chunk(view, step, size):
    for seq in view.prefilling:
        step.prefill(seq, size)
    for seq in view.waiting:
        step.admit(seq, size)


def test_preempted_on_arrival_it_is_computed_like_anybody(make_core, make_request):
    other = make_core(num_swap_blocks=50)
    other.adopt(Migrant(make_request(0, 8), 10, 9))
    other.plan(0.0)
    other.loaded(0)
    step(other)
    other.abort(0)
    assert other.num_free_swap_blocks == 50  # its KV never was in this host's memory


@pytest.mark.parametrize("state", ["unknown", "waiting"])
def test_nothing_to_export(make_core, make_request, state):
    core = make_core()
    if state == "waiting":
        core.add(make_request(0))
    assert core.export(0) is None


def test_rejects_a_migrant_that_does_not_fit(make_core):
    with pytest.raises(RejectedError, match="the KV cache holds 8 of one"):
        make_core(num_blocks=2).adopt(Migrant(Request(0, 0.0, Prompt(6)), 9, 8))
