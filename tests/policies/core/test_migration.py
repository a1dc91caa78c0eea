"""A sequence that moves to another engine: its KV is copied, not recomputed."""

import pytest

from policies.batching.chunked import Chunked
from policies.caching.pool import KvMemory
from policies.caching.prefix import PrefixCaching
from policies.core.engine import EngineCore
from policies.core.limits import RejectedError
from policies.core.plan import Migrant, StepOutcome, Transfer
from policies.core.request import Branching, Prompt, Request, Segment
from policies.core.sequence import FinishReason, SequenceState
from policies.scheduling.fcfs import Fcfs


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
    assert (seq.finish_reason, one.block_pool.num_free, one.num_unfinished) == (FinishReason.migrated, 100, 0)
    arrived = other.adopt(migrant, stop_after=7)
    assert other.plan(0.0) is None
    assert other.take_transfers() == [Transfer(arrived, "remote", "gpu", 12)]
    assert arrived.state is SequenceState.loading
    other.loaded(5)
    assert [step(other) for _ in range(5)] == [{5: 1}] * 4 + [{}]
    assert (arrived.finish_reason, arrived.num_output_tokens) == (FinishReason.stop, 7)
    assert other.block_pool.num_free == 100


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
    with pytest.raises(RejectedError, match="the KV cache holds at most 8 per"):
        make_core(num_blocks=2).adopt(Migrant(Request(0, 0.0, Prompt(6)), 9, 8))


def begin_kv_transfer(core, request_id=5, num_prompt_tokens=10, stop_after=7):
    """Returns a sequence that has its first token and its `Migrant`, with the transfer begun."""
    seq = core.add(Request(request_id, 0.0, Prompt(num_prompt_tokens)), stop_after)
    step(core)
    return seq, core.begin_kv_transfer(request_id)


def test_a_sequence_under_kv_transfer_keeps_slot_and_blocks_and_stands_still(make_core):
    core = make_core()
    seq, migrant = begin_kv_transfer(core)
    assert migrant == Migrant(seq.request, 11, 10)
    assert (seq.state, core.block_pool.num_used, len(core.running)) == (SequenceState.leaving, 3, 1)
    assert core.num_tokens_held == 10
    assert core.plan(1.0) is None  # and this is no standstill
    core.abort(5, FinishReason.migrated)
    core.check_integrity()
    assert (seq.finish_reason, core.block_pool.num_free, core.num_unfinished) == (
        FinishReason.migrated,
        100,
        0,
    )


def test_a_paused_sequence_can_be_transferred(make_core, make_request):
    core = make_core()
    seq = core.add(make_request(0, 10), stop_after=7)
    step(core)
    core.running_set.pause(seq)
    assert core.begin_kv_transfer(0).num_known == 11
    core.check_integrity()


@pytest.mark.parametrize("state", ["unknown", "waiting", "prefilling", "leaving", "branched"])
def test_a_sequence_without_kv_to_copy_is_not_transferred(make_core, make_request, state):
    core = make_core(batching=(lambda view, step: _chunk(view, step, 4)) if state == "prefilling" else None)
    if state == "branched":
        core.add(make_request(0, 8, branching=Branching(2)), stop_after=4)
    elif state != "unknown":
        core.add(make_request(0, 8), stop_after=4)
    if state not in ("unknown", "waiting"):
        step(core)
    if state == "leaving":
        core.begin_kv_transfer(0)
    assert core.begin_kv_transfer(0) is None


def test_a_sequence_decodes_on_when_its_kv_transfer_is_cancelled(make_core):
    core = make_core()
    seq, _ = begin_kv_transfer(core)
    core.cancel_kv_transfer(5)
    assert [step(core) for _ in range(7)] == [{5: 1}] * 6 + [{}]
    assert (seq.finish_reason, core.block_pool.num_free) == (FinishReason.stop, 100)
    with pytest.raises(KeyError):
        core.cancel_kv_transfer(5)


def test_memory_pressure_spares_a_sequence_that_is_leaving(make_core, make_request):
    """6 blocks: 3 leave, the other 3 are full with the 12th token; the need for a 4th is a preemption."""
    core = make_core(num_blocks=6)
    begin_kv_transfer(core, num_prompt_tokens=12)
    seq = core.add(make_request(6, 11), stop_after=9)
    tokens = [step(core) for _ in range(4)]
    assert tokens == [{6: 11}, {6: 1}, {}, {}]
    assert (seq.state, core.leaving[5].state) == (SequenceState.waiting, SequenceState.leaving)
    core.abort(5, FinishReason.migrated)
    assert step(core) == {6: 13}


def make_caching(make_core, num_blocks=100):
    core = make_core(num_blocks=num_blocks)
    return EngineCore(
        batching=core.batching,
        scheduling=core.scheduling,
        block_pool=PrefixCaching(block_size=4).pool(KvMemory(num_blocks)),
        max_num_seqs=8,
        max_model_len=4096,
    )


def text_request(request_id, num_tokens, num_same):
    return Request(request_id, 0.0, Prompt(num_tokens, (Segment(77, num_same),)))


@pytest.mark.parametrize(
    ("num_tokens", "num_same", "num_asked_for"),
    [
        (12, 0, 12),  # nothing is here
        (12, 8, 4),  # two blocks are
        (14, 11, 6),  # the third is not whole
        (24, 24, 12),
        (12, 12, 0),  # all of it is: 12 of 13 known tokens, no transfer
    ],
)
def test_kv_that_the_other_engine_caches_is_not_asked_for(make_core, num_tokens, num_same, num_asked_for):
    one, other = make_core(), make_caching(make_core)
    other.add(text_request(0, 20, 14), stop_after=1)
    step(other)
    one.add(text_request(5, num_tokens, num_same), stop_after=4)
    step(one)
    arrived = other.adopt(one.begin_kv_transfer(5), stop_after=4)
    plan = other.plan(0.0)
    assert [transfer.num_tokens for transfer in other.take_transfers()] == [num_asked_for] * (
        num_asked_for > 0
    )
    if num_asked_for:
        assert plan is None
        other.loaded(5)
        assert step(other) == {5: 1}
    else:
        assert (plan.admitted, plan.tokens_by_request) == ([arrived], {5: 1})
        other.commit(plan, StepOutcome(), 0.0)
    assert arrived.num_found == num_tokens
    assert [step(other) for _ in range(3)] == [{5: 1}] * 2 + [{}]
    assert (arrived.num_output_tokens, other.block_pool.num_free) == (4, 100)
    other.add(text_request(6, num_tokens, num_same), stop_after=2)
    assert step(other) == {
        6: num_tokens - min(num_same, num_tokens - 1) // 4 * 4
    }  # what came is offered, too


def test_only_the_blocks_that_are_missing_are_named():
    one, other = (
        EngineCore(
            batching=Chunked(),
            scheduling=Fcfs(),
            block_pool=PrefixCaching(block_size=4).pool(KvMemory(50)),
            max_num_seqs=8,
            max_model_len=100,
            names_blocks=True,
        )
        for _ in range(2)
    )
    for core, request in ((other, text_request(0, 20, 8)), (one, text_request(5, 15, 8))):
        core.add(request, stop_after=9)
        step(core)
    migrant = one.begin_kv_transfer(5)
    arrived = other.adopt(migrant, stop_after=9)
    other.commit(other.plan(0.0), StepOutcome(), 0.0)
    (transfer,) = other.take_transfers()
    assert transfer.contents == ((-6, 2), (-6, 3))  # of the migrant's four blocks the last two
    assert transfer.blocks == tuple(other.block_ids(arrived, 15)[2:])
    assert (transfer.num_tokens, len(migrant.blocks)) == (7, 4)
