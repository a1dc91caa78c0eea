"""Caches that drop KV: how many tokens a sequence holds, attends to and gives back, worked out on paper."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.batching.chunked import Chunked
from policies.caching.adaptive import FastGen
from policies.caching.contiguous import Contiguous
from policies.caching.paged import Paged
from policies.caching.pool import KvMemory, WeightReads
from policies.caching.prefix import PrefixCaching
from policies.caching.selective import H2o, SnapKv
from policies.caching.streaming import StreamingLlm
from policies.core.engine import EngineCore
from policies.core.plan import StepOutcome
from policies.core.request import Prompt, Request
from policies.scheduling.fcfs import Fcfs

WINDOW = StreamingLlm(num_sink_tokens=2, num_recent_tokens=6, block_size=4)


def make_engine(caching, num_blocks=64, batching=None, num_swap_blocks=0):
    return EngineCore(
        batching=batching or Chunked(),
        scheduling=Fcfs(preemption_mode="swap" if num_swap_blocks else "recompute"),
        block_pool=caching.pool(KvMemory(num_blocks)),
        max_num_seqs=8,
        max_model_len=1000,
        num_swap_blocks=num_swap_blocks,
    )


def add(core, request_id, num_prompt_tokens, num_output_tokens):
    return core.add(Request(request_id, 0.0, Prompt(num_prompt_tokens)), stop_after=num_output_tokens)


def run(core, num_iterations=1):
    """Runs one plan and commits it; copies between tiers are instant."""
    plan = core.plan(0.0)
    transfers = core.take_transfers()
    if plan is not None:
        core.commit(plan, StepOutcome(min(num_iterations, plan.horizon)), 0.0)
    for transfer in transfers:
        if transfer.seq is not None:
            core.loaded(transfer.seq.request_id)
    core.check_integrity()


def live(core):
    """Runs to the end; returns (decode context tokens, blocks in use) of every iteration with decodes."""
    decision_log = []
    while core.num_unfinished:
        plan = core.plan(0.0)
        if plan.num_decodes:
            decision_log.append((plan.num_decode_context_tokens, core.block_pool.num_used))
        core.commit(plan, StepOutcome(), 0.0)
        core.check_integrity()
    return decision_log


def test_a_window_fills_and_then_stands_still():
    """Prompt 5, 2 + 6 tokens kept: decodes attend to 6, 7, 8, 8, ... tokens, in two blocks of 4."""
    core = make_engine(WINDOW)
    add(core, 0, 5, 8)
    assert live(core) == [(6, 2), (7, 2), (8, 2), (8, 2), (8, 2), (8, 2), (8, 2)]
    assert core.block_pool.num_free == 64


def test_a_long_prompt_is_cut_to_the_window_when_it_is_computed():
    """Prompt 30 in 8 blocks, in two chunks; then 8 tokens in 2 blocks."""
    core = make_engine(WINDOW, batching=Chunked(max_num_batched_tokens=16))
    seq = add(core, 0, 30, 4)
    used = []
    for _ in range(2):
        plan = core.plan(0.0)
        used.append(core.block_pool.num_used)
        core.commit(plan, StepOutcome(), 0.0)
    assert used == [4, 8]
    assert (core.block_pool.num_used, seq.num_held, seq.num_computed) == (2, 8, 30)
    assert live(core) == [(8, 2)] * 3


def test_blocks_given_up_serve_the_next_in_line():
    """Nine blocks: two prompts of 30 need eight each. The second is admitted when the first has been cut."""
    core = make_engine(WINDOW, num_blocks=10)
    add(core, 0, 30, 50)
    second = add(core, 1, 30, 5)
    core.commit(core.plan(0.0), StepOutcome(), 0.0)
    assert second.num_computed == 0
    core.commit(core.plan(0.0), StepOutcome(), 0.0)
    assert second.num_computed == 30
    assert core.num_preemptions == 0
    live(core)


def test_ids_of_a_cut_prompt_are_its_first_blocks():
    core = make_engine(WINDOW)
    seq = add(core, 0, 30, 6)
    plan = core.plan(0.0)
    before = list(core.block_ids(seq, 30))
    core.commit(plan, StepOutcome(), 0.0)
    assert core.block_ids(seq, seq.num_held + 1) == before[:2]
    other = add(core, 1, 30, 6)
    core.plan(0.0)
    assert set(core.block_ids(other, 30)) & set(before[2:]), "what was given up is used again"
    assert not set(core.block_ids(other, 30)) & set(before[:2])


def test_a_full_window_leaps_to_its_end():
    """Horizon: to the token with which the window is full, 3 ahead; then to the end of the answer."""
    core = make_engine(WINDOW)
    add(core, 0, 5, 100)
    horizons = []
    while core.num_unfinished:
        plan = core.plan(0.0)
        horizons.append(plan.horizon)
        core.commit(plan, StepOutcome(plan.horizon), 0.0)
        core.check_integrity()
    assert horizons == [1, 3, 96]


def test_heavy_hitters_hold_as_much_as_a_window_of_their_length_but_read_weights():
    heavy = make_engine(H2o(num_heavy_tokens=5, num_recent_tokens=3, block_size=4))
    window = make_engine(WINDOW)
    for core in (heavy, window):
        add(core, 0, 5, 20)
        add(core, 1, 17, 9)
    assert live(heavy) == live(window)
    assert H2o().weight_reads == WeightReads(decode_share=1.0, prompt_rows=None)
    assert StreamingLlm().weight_reads is None
    assert SnapKv(num_window_tokens=16).weight_reads == WeightReads(decode_share=0.0, prompt_rows=16)


def test_the_three_hold_different_tokens_after_a_long_prompt():
    """Prompt 30, budget 8, 6 output tokens: the window stands still, the compressed prompt grows."""
    caches = {
        "streaming_llm": WINDOW,
        "h2o": H2o(num_heavy_tokens=2, num_recent_tokens=6, block_size=4),
        "snapkv": SnapKv(num_kept_tokens=8, num_window_tokens=2, block_size=4),
    }
    contexts = {}
    for name, caching in caches.items():
        core = make_engine(caching)
        add(core, 0, 30, 6)
        contexts[name] = [context for context, _ in live(core)]
    assert contexts == {"streaming_llm": [8] * 5, "h2o": [8] * 5, "snapkv": [9, 10, 11, 12, 13]}


def test_a_compressed_prompt_keeps_its_whole_answer():
    """Prompt 30 cut to 6 tokens; decodes attend to 7, 8, 9, ..."""
    core = make_engine(SnapKv(num_kept_tokens=6, num_window_tokens=2, block_size=4))
    add(core, 0, 30, 6)
    assert live(core) == [(7, 2), (8, 2), (9, 3), (10, 3), (11, 3)]


def test_a_prompt_within_the_budget_is_left_alone():
    compressed = SnapKv(num_kept_tokens=30, num_window_tokens=2, block_size=4)
    whole, paged = make_engine(compressed), make_engine(Paged(block_size=4))
    for core in (whole, paged):
        add(core, 0, 30, 6)
    assert live(whole) == live(paged)


def test_a_full_window_that_is_preempted_in_the_step_that_would_decode_it_gives_back_its_blocks():
    """Window 8 in two blocks of 4: the token planned was to take the place of another, no third block."""

    class DecodeThenPreempt:
        def fill(self, view, step, now):
            decoding = list(view.decoding)
            for seq in decoding:
                step.decode(seq)
            if len(decoding) == 2 and decoding[1].num_held == 8:
                step.preempt(decoding[1])
            for seq in view.waiting:
                step.admit(seq, 100)

    core = make_engine(WINDOW, batching=DecodeThenPreempt())
    add(core, 0, 5, 12)
    second = add(core, 1, 9, 3)
    for _ in range(3):
        core.commit(core.plan(0.0), StepOutcome(), 0.0)
        core.check_integrity()
    assert second.num_preemptions >= 1


def test_an_idle_or_paused_sequence_holds_its_window():
    class OneAtATime:
        def fill(self, view, step, now):
            for seq in view.paused:
                step.resume(seq)
            decoding = sorted(view.decoding, key=lambda seq: (seq.num_known, seq.request_id))
            for seq in decoding[:1]:
                step.decode(seq)
            for seq in decoding[2:]:
                step.pause(seq)
            for seq in view.waiting:
                step.admit(seq, 100)

    core = make_engine(WINDOW, batching=OneAtATime())
    for request_id in range(3):
        add(core, request_id, 5 + request_id, 12)
    live(core)
    assert core.block_pool.num_free == 64


@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 3, 4, 8, 16]),
    st.sampled_from(["streaming", "h2o", "snapkv", "fastgen"]),
    st.sampled_from([0, 20]),
)
def test_random_traffic_leaks_nothing_and_holds_no_more_than_allowed(seed, block_size, kind, num_swap_blocks):
    """The cache is so small that sequences are preempted."""
    rng = random.Random(seed)
    kept = rng.randint(1, 20)
    caching = {
        "streaming": StreamingLlm(num_sink_tokens=1, num_recent_tokens=kept, block_size=block_size),
        "h2o": H2o(num_heavy_tokens=1, num_recent_tokens=kept, block_size=block_size),
        "snapkv": SnapKv(num_kept_tokens=kept, num_window_tokens=1, block_size=block_size),
        "fastgen": FastGen(block_size=block_size),
    }[kind]
    core = make_engine(caching, -(-rng.randint(50, 90) // block_size), None, num_swap_blocks)
    for request_id in range(20):
        add(core, request_id, rng.randint(1, 25), rng.randint(1, 20))
        for _ in range(rng.randint(0, 5)):
            if not core.num_unfinished:
                break
            run(core, rng.randint(1, 30))
            for seq in core.view.decoding:
                answer = seq.num_computed - seq.num_prompt_tokens
                limit = min(seq.num_prompt_tokens, kept) + answer if kind == "snapkv" else 1 + kept
                if isinstance(caching, FastGen):
                    limit = caching.num_kept(seq.num_computed) + block_size
                assert seq.num_held <= limit
    while core.num_unfinished:
        run(core)
    assert core.block_pool.num_free == core.block_pool.num_blocks
    assert core.num_free_swap_blocks == num_swap_blocks


def test_a_cache_says_whether_it_changes_answers():
    assert all(caching.changes_outputs for caching in (StreamingLlm, H2o, SnapKv, FastGen))
    assert not any(caching.changes_outputs for caching in (Paged, PrefixCaching, Contiguous))


@pytest.mark.parametrize(
    ("caching", "settings", "message"),
    [
        (StreamingLlm, {"num_sink_tokens": -1}, "num_sink_tokens=-1: must be >= 0"),
        (StreamingLlm, {"num_recent_tokens": 0}, "num_recent_tokens=0: must be >= 1"),
        (StreamingLlm, {"block_size": 0}, "block_size=0: must be >= 1"),
        (H2o, {"num_heavy_tokens": -1}, "num_heavy_tokens=-1: must be >= 0"),
        (H2o, {"num_recent_tokens": 0}, "num_recent_tokens=0: must be >= 1"),
        (H2o, {"watermark": 1.0}, "watermark=1.0: must be a share, >= 0 and < 1"),
        (SnapKv, {"num_kept_tokens": 0}, "num_kept_tokens=0: must be >= 1"),
        (SnapKv, {"num_window_tokens": 0}, "num_window_tokens=0: must be >= 1"),
        (SnapKv, {"num_kept_tokens": 31}, "num_window_tokens=32: must be at most num_kept_tokens=31"),
    ],
)
def test_rejects_impossible_settings(caching, settings, message):
    with pytest.raises(ValueError, match=message):
        caching(**settings)
