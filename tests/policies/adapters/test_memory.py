"""Adapters and KV in one pool of blocks: each gives way to the other, and nothing is leaked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.adapters.serving import Adapter, AdapterMemory, Registry
from policies.adapters.unified_paging import UnifiedPaging
from policies.caching.paged import Paged
from policies.caching.prefix import PrefixCaching
from policies.caching.radix import Radix
from policies.core.limits import RejectedError
from tests.policies.adapters.machine import Machine, registry_of


def test_an_adapter_takes_blocks_of_kv_memory_by_its_rank():
    machine = Machine(UnifiedPaging(), registry_of("a", rank=9))  # 9 bytes: 3 blocks of 4
    machine.ask("a", num_prompt_tokens=4, num_output_tokens=9)
    machine.step()
    machine.step()
    assert machine.residents.num_blocks == 3
    assert machine.core.block_pool.num_used == 3 + 1
    machine.run()
    assert machine.core.block_pool.num_used == 3  # it is unused, and it stays


def test_an_idle_adapter_gives_way_to_the_kv_of_a_prompt_and_of_an_answer():
    for num_prompt, num_output in ((24, 2), (4, 22)):
        machine = Machine(UnifiedPaging(), registry_of("a"), num_blocks=6)
        machine.ask("a")
        machine.run()
        assert machine.residents.num_blocks == 1
        machine.ask(None, num_prompt, num_output)
        machine.run()
        assert machine.residents.counts.num_evicted == 1
        assert machine.residents.num_blocks == machine.core.block_pool.num_used == 0


def test_an_adapter_in_use_makes_sequences_go_not_itself():
    machine = Machine(UnifiedPaging(), registry_of("a"), num_blocks=8)
    first, second = machine.ask("a", 8, 20), machine.ask(None, 8, 20)
    machine.run()
    assert machine.core.num_preemptions > 0
    assert first.num_preemptions == 0 < second.num_preemptions
    assert machine.residents.counts.num_evicted == 0


def test_a_prompt_that_fits_only_without_its_adapter_is_rejected():
    machine = Machine(UnifiedPaging(), registry_of("a"), num_blocks=6)
    machine.ask(None, 24, 1)
    machine.ask("a", 20, 1)
    with pytest.raises(
        RejectedError, match=r"prompt of 21 tokens: the KV cache holds at most 20 .* its adapter"
    ):
        machine.ask("a", 21, 1)
    machine.run()


def test_a_wanted_adapter_is_evicted_last():
    machine = Machine(UnifiedPaging(), registry_of("abc"), num_blocks=6, max_num_seqs=1)
    for name in "ab":
        machine.ask(name)
        machine.run()
    machine.ask(None, 4, 14)  # takes five blocks in the end; a and b have one each
    machine.ask("a")
    machine.run()
    assert [name for name, _ in machine.log] == ["a", "b"]  # b, used later, had to go


@given(
    asks=st.lists(
        st.tuples(st.sampled_from([None, *"abcd"]), st.integers(1, 20), st.integers(1, 20)),
        min_size=1,
        max_size=12,
    ),
    num_blocks=st.integers(12, 24),
    block_size=st.sampled_from([1, 4]),
    cache=st.sampled_from([Paged, PrefixCaching, Radix]),
    prefetch=st.integers(0, 3),
    data=st.data(),
)
def test_no_block_is_leaked_and_every_request_ends(asks, num_blocks, block_size, cache, prefetch, data):
    """After every commit, as `Machine.step` checks: blocks free + owned + of adapters = all."""
    ranks = {name: data.draw(st.sampled_from([1, 4, 9])) for name in "abcd"}
    adapters = [Adapter(name=name, rank=rank) for name, rank in ranks.items()]
    registry = Registry(adapters, "base", AdapterMemory(1.0, 4.0))
    caching = cache(block_size=block_size)
    machine = Machine(UnifiedPaging(prefetch=prefetch), registry, num_blocks=num_blocks, caching=caching)
    for adapter, num_prompt, num_output in asks:
        try:
            machine.ask(adapter, num_prompt, num_output)
        except RejectedError:
            continue
        machine.step(come=data.draw(st.booleans()))
    for _ in range(2000):
        if not machine.core.num_unfinished:
            break
        machine.step(
            come=data.draw(st.booleans()) or not machine.core.running or not machine.core.decodes.size
        )
    assert not machine.core.num_unfinished
    machine.come()
    pool = machine.core.block_pool
    assert pool.num_used == machine.residents.num_blocks
    machine.residents.evict_until(lambda: False)
    assert pool.num_used == machine.residents.num_blocks == 0
    machine.core.check_integrity()
