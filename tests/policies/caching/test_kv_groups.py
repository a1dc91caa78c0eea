"""KV groups: blocks by hand, equality with other caches for one group, leaps, and the groups of real models.

tests/parity compares every decision with vLLM's hybrid KV cache manager.
"""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from policies.batching.chunked import Chunked
from policies.caching.block_tables import KvGroup, KvLayerKind, kv_groups
from policies.caching.hybrid import KvGroups
from policies.caching.pool import KvMemory
from policies.core.endings import Ends
from policies.core.engine import EngineCore
from policies.core.plan import StepOutcome
from policies.core.request import Prompt, Request, Segment
from policies.scheduling.fcfs import Fcfs
from tests.parity.lockstep import OurEngine, first_difference
from tests.parity.workloads import make_workload

FULL, WINDOW_6, CHUNK_8 = KvGroup(), KvGroup(1, 6), KvGroup(1, 8, is_chunked=True)


def make_engine(groups, num_blocks=64, max_num_batched_tokens=64, num_swap_blocks=0, ends=Ends.at_once):
    num_steps = 2 if ends is Ends.one_step_late else 1
    memory = KvMemory(
        num_blocks, groups=groups, max_in_flight_tokens=num_steps * max_num_batched_tokens, max_model_len=1000
    )
    return EngineCore(
        batching=Chunked(max_num_batched_tokens=max_num_batched_tokens),
        scheduling=Fcfs(preemption_mode="swap" if num_swap_blocks else "recompute"),
        block_pool=KvGroups(block_size=4).pool(memory),
        max_num_seqs=8,
        max_model_len=1000,
        num_swap_blocks=num_swap_blocks,
        ends=ends,
    )


def run(core, *requests):
    """Runs requests to their ends; returns (computed tokens of the first, blocks in use) by iteration."""
    sequences = [core.add(request, stop_after=request.max_tokens) for request in requests]
    decision_log = []
    while core.num_unfinished:
        plan = core.plan(0.0)
        for transfer in core.take_transfers():
            if transfer.seq is not None:
                core.loaded(transfer.seq.request_id)
        if plan is None:
            continue
        decision_log.append((sequences[0].num_computed, core.block_pool.num_used))
        core.commit(plan, StepOutcome(), 0.0)
        core.check_integrity()
    return decision_log


class Others(OurEngine):
    """Our engine as the other one of a comparison, with one group if the settings have none."""

    def __init__(self, settings):
        super().__init__(replace(settings, groups=settings.groups or (FULL,)))

    def step(self):
        return self.steps(self.core.now, 1)[0]

    def settle(self):
        assert not self.steps(self.core.now, 1)  # which frees what has ended with the last step
        return super().settle()


def test_a_window_holds_the_blocks_that_it_reaches():
    """Blocks of 4, window of 6: the token at 8 reaches back to 3, in block 0; that at 9 to 4, in block 1."""
    decision_log = run(make_engine((FULL, WINDOW_6)), Request(0, 0.0, Prompt(6), max_tokens=12))
    expected = [(0, 4), (6, 4), (7, 4), (8, 6), (9, 5), (10, 5), (11, 5), (12, 7), (13, 6), (14, 6), (15, 6)]
    assert decision_log[: len(expected)] == expected


def test_a_chunk_drops_what_was_before_its_first_token():
    """Chunks of 8, blocks of 4: with 8 tokens computed, the next one needs none of them."""
    decision_log = run(make_engine((CHUNK_8,)), Request(0, 0.0, Prompt(6), max_tokens=14))
    expected = [(0, 2), (6, 2), (7, 2), (8, 1), (9, 1), (10, 1), (11, 1), (12, 2), (13, 2), (14, 2), (15, 2)]
    assert decision_log[: len(expected)] == expected
    assert decision_log[len(expected)] == (16, 1)


def test_a_prompt_in_chunks_frees_what_its_window_has_left():
    """Steps of 8 tokens, window of 6: before the step from 8 on, blocks before token 3 are free: none."""
    decision_log = run(
        make_engine((WINDOW_6,), max_num_batched_tokens=8), Request(0, 0.0, Prompt(32), max_tokens=1)
    )
    assert decision_log == [(0, 2), (8, 4), (16, 4), (24, 4)]  # 16 and 24: tokens from 11 and 19 on are kept


def test_with_asynchronous_scheduling_a_window_keeps_what_the_step_in_flight_reads():
    """The window of the token at 9 has left block 0, which is free when the step after it is planned."""
    core = make_engine((FULL, WINDOW_6), ends=Ends.one_step_late)
    decision_log = run(core, Request(0, 0.0, Prompt(6), max_tokens=12))
    expected = [(0, 4), (6, 4), (7, 4), (8, 6), (9, 6), (10, 5), (11, 5), (12, 7), (13, 7), (14, 6), (15, 6)]
    assert decision_log[: len(expected)] == expected


def test_with_asynchronous_scheduling_a_chunk_keeps_what_the_chunk_before_reads():
    """Steps of 8, window of 6. At 16 the chunk from 8 on is in flight and reads from 3 on: no block is free.

    At 24 that from 16 on reads from 11 on: blocks 0 and 1 of 8 are free. At 32, the first decode, that from
    24 on reads from 19 on: 4 of 9; at 33, the first decode in flight reads from 27 on: 6 of 9.
    """
    core = make_engine((WINDOW_6,), max_num_batched_tokens=8, ends=Ends.one_step_late)
    decision_log = run(core, Request(0, 0.0, Prompt(32), max_tokens=3))
    assert decision_log == [(0, 2), (8, 4), (16, 6), (24, 6), (32, 5), (33, 3)]
    assert core.block_pool._max_blocks == [7]  # (5 + 2 * 8) / 4, and one more


@pytest.mark.parametrize(
    ("group", "cached", "expected"),
    [
        (FULL, {0, 1, 3, 4}, 2),
        (WINDOW_6, {0, 1, 3, 4}, 5),  # 5 earlier tokens lie in two blocks: 3 and 4
        (WINDOW_6, {2, 3, 5}, 4),
        (WINDOW_6, {0, 4}, 1),  # a prefix shorter than the window needs all of its blocks
        (WINDOW_6, {2}, 0),
        (CHUNK_8, {1}, 4),  # six blocks end chunk 2, which begins with block 4: none is needed before it
        (CHUNK_8, {4}, 5),
    ],
)
def test_a_prefix_is_found_if_attention_reaches_cached_blocks_only(group, cached, expected):
    num_blocks = 6 if group is not CHUNK_8 else 5
    assert group.longest_hit(cached.__contains__, num_blocks, 4) == expected


def test_a_hit_is_one_of_all_groups():
    """All 32 tokens of a prompt are cached, of which 28 are found; then a window has lost blocks 5, 6."""
    core = make_engine((FULL, WINDOW_6))
    prompt = Prompt(32, (Segment(7, 32),))
    run(core, Request(0, 0.0, prompt, max_tokens=1))
    assert core.block_pool.peek(Request(1, 0.0, prompt)) == 28
    first = core.block_pool._index[1]
    for content in sorted(first)[5:7]:  # blocks 5 and 6 of the group with a window, which 28 tokens need
        core.block_pool._unowned.pop(next(iter(first[content])))
        del first[content]
    assert core.block_pool.peek(Request(1, 0.0, prompt)) == 20
    later = core.add(Request(1, 0.0, prompt), stop_after=1)
    core.commit(core.plan(0.0), StepOutcome(), 0.0)
    assert later.num_found == 20
    core.check_integrity()


@pytest.mark.parametrize(
    "mode", ["prefix", "prefix+priority", "prefix+first_chunk", "prefix+watermark", "fcfs"]
)
def test_one_group_with_full_attention_decides_as_the_caches_without_groups(mode):
    for seed in range(15):
        assert first_difference(make_workload(mode, seed), Others, leaps=seed % 2 == 1) is None


@example(mode="async+prefix+windows", seed=36)  # no request is left between two arrivals
@given(
    st.sampled_from(
        [
            "windows",
            "prefix+windows+priority+threshold",
            "prefix+chunks",
            "async+prefix+windows",
            "async+windows",
        ]
    ),
    st.integers(0, 10**6),
)
def test_leaps_decide_as_steps_and_no_block_is_lost(mode, seed):
    assert first_difference(make_workload(mode, seed), Others, leaps=True) is None


def test_swapped_sequences_come_back_with_the_blocks_of_their_windows():
    """Two sequences of 40 tokens need 10 blocks each for full attention, and 4 for a window: not 24."""
    requests = [Request(i, float(i), Prompt(8), max_tokens=32) for i in range(2)]
    core = make_engine((FULL, WINDOW_6), num_blocks=18, num_swap_blocks=100)
    run(core, *requests)
    assert core.num_preemptions > 0
    assert core.block_pool.num_free == 18


@pytest.mark.parametrize(("num_blocks", "expected"), [(10, 20), (14, 36), (15, 40)])
def test_the_longest_sequence_is_that_of_full_attention_next_to_a_full_window(num_blocks, expected):
    """Window of 6, steps of 8: (5 + 8) / 4 = 4 blocks and one more; up to 5 both groups have the same."""
    memory = KvMemory(num_blocks, groups=(FULL, WINDOW_6), max_in_flight_tokens=8, max_model_len=1000)
    assert KvGroups(block_size=4).pool(memory).max_tokens_per_seq == expected


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([(10, None), (52, 1024)], (10, 1, 6)),  # Gemma 3 27B
        ([(12, 128), (12, None)], (12, 1, 1)),  # gpt-oss-20b
        ([(12, 128), (13, None)], (13, 1, 1)),  # with the layer of a draft: 13 rather than three groups of 12
        ([(32, 4096)], (32, 0, 1)),  # Mistral 7B v0.1
    ],
)
def test_groups_have_the_layers_of_the_rarest_kind(kinds, expected):
    groups = kv_groups(KvLayerKind(count, window, False, 4096.0) for count, window in kinds)
    num_full = sum(group.window is None for group in groups)
    assert (groups[0].num_layers, num_full, len(groups) - num_full) == expected
    assert len({group.num_layers for group in groups}) == 1


def test_layers_of_unequal_kv_are_refused():
    with pytest.raises(
        ValueError, match=r"caching=kv_groups: all layers .* found 2,048, 4,096; choose caching"
    ):
        kv_groups([KvLayerKind(1, None, False, 4096.0), KvLayerKind(1, 8, False, 2048.0)])
