"""An index that is built from the events has at every moment what the cache has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("msgspec", reason="needs the extra serve: pip install 'windtunnel[serve]'")
pytest.importorskip("zmq", reason="needs the extra serve: pip install 'windtunnel[serve]'")

import msgspec

from experiments.serve.kv_events.block_chain import BlockChain
from experiments.serve.kv_events.cache_events import CacheEvents, EventBatch
from policies.caching.content import PRIVATE_PLACES
from policies.caching.prefix import PrefixCaching
from policies.caching.radix import Radix
from policies.caching.tiered import GIB, Tiered, TieredPool
from policies.core.engine import EngineCore
from policies.core.request import Prompt, Request, Segment
from tests.policies.caching.test_reporting import asked, make_engine, quoted, steps
from tests.policies.cores import async_core
from tests.worlds.kv_events import KnownBlocks, decoded

CACHES = {
    "prefix": PrefixCaching(block_size=4),
    "radix": Radix(block_size=4),
    "tiers": Tiered(block_size=4, host_gib=60 / GIB, disk_gib=80 / GIB, min_load_tokens=4),
    "tiers, written through": Tiered(block_size=4, host_gib=60 / GIB, write="through", min_load_tokens=4),
}
MEDIA = {"host": "CPU", "disk": "STORAGE"}


def token_ids(request, num_output):
    """Returns tokens of their own for each content."""
    whole = [*request.prompt.segments, Segment(request.answer_id, num_output)]
    return [1000 * content + place for content, num_tokens in whole for place in range(num_tokens)]


def num_in_tier(tier):
    held = tier._at.items()
    return sum(end - first for place, ranges in held if place < PRIVATE_PLACES for first, end in ranges)


@pytest.mark.parametrize("caching", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("kind", [EngineCore, async_core])
@given(asks=asked, num_blocks=st.integers(26, 40))
def test_an_index_of_the_events_has_what_the_cache_has(caching, kind, asks, num_blocks):
    requests = quoted(asks)
    core = make_engine(caching, num_blocks, kind)
    chains = {
        request.request_id: BlockChain(token_ids(request, num_output), caching.block_size)
        for request, num_output in requests
    }
    events, known = CacheEvents(chains), KnownBlocks(None, None)
    assert events.listen(core.block_pool)

    def compare():
        core.block_pool.report_delayed(core.running.values())
        known.apply(decoded(msgspec.msgpack.encode(EventBatch(0.0, events.take()))))
        for request, num_output in requests:
            whole = (*request.prompt.segments, Segment(request.answer_id, num_output))
            num_tokens = request.prompt.num_tokens + num_output
            probe = Request(999, 0.0, Prompt(num_tokens, whole))
            num_found = known.num_found("GPU", chains[request.request_id], num_tokens - 1)
            assert core.block_pool.peek(probe) == num_found * caching.block_size
        for tier in core.block_pool._tiers if isinstance(core.block_pool, TieredPool) else ():
            assert len(known.hashes(MEDIA[tier.name])) == num_in_tier(tier)

    for _ in steps(core, requests, compare):
        pass
    compare()


def test_a_new_pool_clears_what_the_old_one_had():
    events = CacheEvents({1: BlockChain(list(range(8)), 4)})
    events.listen(make_engine(CACHES["prefix"], 10).block_pool)
    events.listen(make_engine(CACHES["prefix"], 10).block_pool)
    assert not events.take()
    events.stored(1, 0, ["one", "two"])
    events.listen(make_engine(CACHES["prefix"], 10).block_pool)
    kinds = [type(event).__name__ for event in events.take()]
    assert kinds == ["BlockStored", "AllBlocksCleared"]


def test_equal_blocks_with_two_names_are_one_block_of_the_index():
    chain = BlockChain(list(range(8)), 4)
    events = CacheEvents({1: chain, 2: BlockChain(list(range(8)), 4)})
    events.stored(1, 0, ["one", "two"])
    events.stored(2, 0, ["other", "another"])
    events.removed(["two", "one"])
    assert len(events.take()) == 1
    events.removed(["another", "other"])
    (removed,) = events.take()
    assert removed.block_hashes == [chain.external_hash(1), chain.external_hash(0)]


def test_blocks_of_an_adapter_and_a_salt_have_other_hashes_and_say_why():
    chain = BlockChain(list(range(8)), 4, lora="sql", lora_number=3, lora_path="sql", cache_salt="mine")
    plain = BlockChain(list(range(8)), 4)
    events = CacheEvents({1: chain})
    events.stored(1, 0, ["one", "two"])
    (stored,) = events.take()
    assert stored.extra_keys == [("sql", "mine"), ("sql",)]
    assert (stored.lora_name, stored.lora_id) == ("sql", 3)
    assert not set(stored.block_hashes) & {plain.external_hash(0), plain.external_hash(1)}
