"""Pinned prefixes: kept for a time after each use, within their share of the memory."""

import pytest

from policies.batching.chunked import Chunked
from policies.caching.pool import KvMemory
from policies.caching.prefix import PrefixCaching
from policies.core.engine import EngineCore
from policies.core.plan import StepOutcome
from policies.core.request import Prompt, Request, Segment
from policies.scheduling.fcfs import Fcfs


def make_engine(max_pinned_share=0.5, num_blocks=16):
    caching = PrefixCaching(block_size=4, pin_s=10.0, max_pinned_share=max_pinned_share)
    return EngineCore(
        batching=Chunked(),
        scheduling=Fcfs(),
        block_pool=caching.pool(KvMemory(num_blocks)),
        max_num_seqs=8,
        max_model_len=4096,
    )


def serve(core, request_id, now, *segments, num_pinned=0):
    """Serves a request of one output token from `now` to now + 1; returns the cached tokens that it found."""
    num_tokens = sum(n for _, n in segments) + 1
    prompt = Prompt(num_tokens, tuple(Segment(*segment) for segment in segments), num_pinned)
    seq = core.add(Request(request_id, now, prompt), stop_after=1)
    while (plan := core.plan(now)) is not None:
        now += 1
        core.commit(plan, StepOutcome(), now)
        core.check_integrity()
    return seq.num_found


def test_a_pinned_prefix_outlives_what_evicts_everything_else():
    """16 blocks, 8 of which may be pinned: system 7 (16 tokens) is pinned, system 8 is not; then a flood."""
    core = make_engine()
    serve(core, 0, 0.0, (7, 16), num_pinned=16)
    serve(core, 1, 1.0, (8, 12))
    assert core.block_pool.num_pinned == 4
    for request_id in range(2, 5):
        serve(core, request_id, 1.0 + request_id, (100 + request_id, 28))
    assert serve(core, 6, 7.0, (8, 12)) == 0
    assert serve(core, 7, 9.0, (7, 16), num_pinned=16) == 16


def test_a_pin_ends_some_time_after_its_last_use_and_is_paid_for_until_then():
    """Used at 1 (end of service), again at 6: kept until 16, 15 s in all."""
    core = make_engine()
    serve(core, 0, 0.0, (7, 16), num_pinned=16)
    serve(core, 1, 5.0, (7, 16), num_pinned=16)
    assert core.block_pool.expires_s == 16.0
    assert core.block_pool.pinned_time.token_s_until(12.0) == 16 * 11
    serve(core, 2, 16.0, (9, 4))
    assert core.block_pool.num_pinned == 0
    assert core.block_pool.pinned_time.token_s_until(99.0) == 16 * 15


def test_what_does_not_fit_the_share_is_not_pinned():
    core = make_engine(max_pinned_share=0.2)
    serve(core, 0, 0.0, (7, 16), num_pinned=16)  # 4 blocks, 3 may be
    assert core.block_pool.num_pinned == 0
    serve(core, 1, 1.0, (8, 16), num_pinned=9)  # two full blocks
    assert core.block_pool.num_pinned == 2


def test_sequences_may_not_count_on_the_share_of_the_pinned():
    core = make_engine(max_pinned_share=0.5)
    assert core.block_pool.max_tokens_per_seq == 32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pin_s": 0.0}, "pin_s=0.0: must be > 0 s"),
        ({"max_pinned_share": 1.0}, "max_pinned_share=1.0: must be a share, >= 0 and < 1"),
    ],
)
def test_rejects_impossible_pins(settings, message):
    with pytest.raises(ValueError, match=message):
        PrefixCaching(**settings)


def test_pins_end_in_the_order_of_their_last_use():
    """7 is used at 1, 8 at 2, 7 again at 4: 8 ends at 12, 7 at 14."""
    core = make_engine()
    serve(core, 0, 0.0, (7, 16), num_pinned=16)
    serve(core, 1, 1.0, (8, 8), num_pinned=8)
    serve(core, 2, 3.0, (7, 16), num_pinned=16)
    assert (core.block_pool.num_pinned, core.block_pool.expires_s) == (4 + 2, 12.0)
    serve(core, 3, 12.0, (9, 4))
    assert (core.block_pool.num_pinned, core.block_pool.expires_s) == (4, 14.0)
    assert core.block_pool.pinned_time.token_s_until(14.0) == 8 * 10 + 16 * 13


def test_a_share_that_a_pin_gives_back_can_be_pinned_again():
    core = make_engine(max_pinned_share=0.25)
    serve(core, 0, 0.0, (7, 16), num_pinned=16)
    serve(core, 1, 1.0, (8, 16), num_pinned=16)
    assert core.block_pool.num_pinned == 4, "no room for the second"
    serve(core, 2, 11.0, (8, 16), num_pinned=16)
    assert (core.block_pool.num_pinned, core.block_pool.expires_s) == (4, 22.0)
