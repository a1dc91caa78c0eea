"""States of linear attention in KV blocks: a sequence owns them from its admission until it leaves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.batching.chunked import Chunked
from policies.caching.hybrid import KvGroups
from policies.caching.paged import Paged
from policies.caching.pool import KvMemory, pool_of
from policies.caching.prefix import PrefixCaching
from policies.caching.radix import Radix
from policies.caching.tiered import Tiered
from policies.core.engine import EngineCore
from policies.core.limits import RejectedError
from policies.core.plan import StepOutcome
from policies.core.request import Prompt, Request, Segment
from policies.scheduling.fcfs import Fcfs

BLOCK_SIZE = 4
CACHES = (Paged, PrefixCaching, Radix, Tiered, KvGroups)


def engine(caching, num_blocks, state_blocks):
    memory = KvMemory(num_blocks, bytes_per_token=1.0, max_model_len=64, state_blocks=state_blocks)
    return EngineCore(
        batching=Chunked(max_num_batched_tokens=16),
        scheduling=Fcfs(),
        block_pool=pool_of(caching(block_size=BLOCK_SIZE), memory),
        max_num_seqs=8,
        max_model_len=64,
    )


def test_states_limit_the_sequences_that_run():
    """Ten blocks; a sequence of up to 4 tokens takes one for its KV and three for its states: two run."""
    core = engine(Paged, 10, 3)
    for number in range(3):
        core.add(Request(number, 0.0, Prompt(3), max_tokens=1))
    plan = core.plan(0.0)
    assert plan.tokens_by_request == {0: 3, 1: 3}
    assert (core.block_pool.num_free, core.block_pool.num_extra_blocks) == (2, 6)
    core.commit(plan, StepOutcome(), 0.0)
    assert core.plan(0.0).tokens_by_request == {2: 3}


def test_a_prompt_that_fits_only_without_its_states_is_rejected():
    core = engine(Paged, 10, 3)
    core.add(Request(0, 0.0, Prompt(28), max_tokens=1))
    with pytest.raises(RejectedError, match="the KV cache holds at most 28 per sequence"):
        core.add(Request(1, 0.0, Prompt(29), max_tokens=1))


@pytest.mark.parametrize("caching", CACHES)
@given(
    st.integers(0, 4),
    st.lists(st.tuples(st.integers(1, 24), st.integers(1, 12), st.integers(0, 2)), min_size=1, max_size=12),
)
def test_every_request_ends_and_every_block_is_free_again(caching, state_blocks, requests):
    """12 blocks hold one sequence of at most 36 tokens with its states, so that preemptions occur."""
    core = engine(caching, 9 + state_blocks, state_blocks)
    for number, (num_prompt, num_output, content) in enumerate(requests):
        prompt = Prompt(num_prompt, (Segment(content, num_prompt),) if content else ())
        core.add(Request(number, 0.0, prompt, max_tokens=num_output))
    while (plan := core.plan(0.0)) is not None:
        core.commit(plan, StepOutcome(), 0.0)
        assert core.block_pool.num_extra_blocks == state_blocks * len(core.running)
        core.check_integrity()
    assert core.block_pool.num_free == core.block_pool.num_blocks
