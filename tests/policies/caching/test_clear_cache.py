"""A cleared cache finds nothing, leaks no block, and leaves running sequences what they have."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.batching.chunked import Chunked
from policies.caching.paged import Paged
from policies.caching.pool import KvMemory
from policies.caching.prefix import PrefixCaching
from policies.caching.radix import Radix
from policies.caching.tier import Tier
from policies.caching.tiered import TieredPool
from policies.core.engine import EngineCore
from policies.core.plan import StepOutcome
from policies.core.request import Prompt, Request, Segment
from policies.scheduling.fcfs import Fcfs

POOLS = {
    "paged": lambda: Paged(block_size=4).pool(KvMemory(30)),
    "prefix": lambda: PrefixCaching(block_size=4).pool(KvMemory(30)),
    "radix": lambda: Radix(block_size=4).pool(KvMemory(30)),
}
pieces = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12)), min_size=1, max_size=3)


def make_engine(pool):
    return EngineCore(
        batching=Chunked(max_num_batched_tokens=16),
        scheduling=Fcfs(),
        block_pool=pool,
        max_num_seqs=4,
        max_model_len=4096,
    )


def request_of(request_id, prompt):
    segments = tuple(Segment(*piece) for piece in prompt)
    return Request(request_id, 0.0, Prompt(sum(n for _, n in prompt), segments), answer_id=10 + request_id)


@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
@given(prompts=st.lists(pieces, min_size=1, max_size=8), clear_at=st.sets(st.integers(0, 40)))
def test_a_cleared_cache_finds_only_what_running_sequences_have(pool, prompts, clear_at):
    core = make_engine(pool())
    for i, prompt in enumerate(prompts):
        core.add(request_of(i, prompt), stop_after=3)
    step = 0
    while (plan := core.plan(0.0)) is not None:
        core.commit(plan, StepOutcome(), 0.0)
        if step in clear_at:
            core.block_pool.clear_cache()
            num_free = core.block_pool.num_free
            assert core.block_pool.num_free_without_content == num_free
        core.check_integrity()
        step += 1
    core.block_pool.clear_cache()
    core.check_integrity()
    assert core.block_pool.num_free == core.block_pool.num_blocks
    assert all(core.block_pool.peek(request_of(99, prompt)) == 0 for prompt in prompts)


def test_other_tiers_keep_what_they_have_and_get_nothing():
    tier = Tier("host", 100)
    pool = TieredPool(30, 4, 0, tiers=[tier], writes_through=False, min_load_tokens=1)
    core = make_engine(pool)
    core.add(request_of(0, [(1, 40)]), stop_after=1)
    while (plan := core.plan(0.0)) is not None:
        core.commit(plan, StepOutcome(), 0.0)
    pool.clear_cache()
    core.check_integrity()
    assert not tier.places
    assert pool.peek(request_of(1, [(1, 40)])) == 0
