"""While the server runs, garbage is collected in small steps, and as a whole when nothing is in progress."""

import asyncio
import gc
from itertools import cycle

import pytest

from experiments.serve import server
from experiments.serve.server import short_collections


@pytest.fixture
def full_collections():
    """Collects the passes over all generations that happen meanwhile."""
    found = []

    def note(phase, info):
        if phase == "start" and info["generation"] == 2:
            found.append(info)

    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)


def test_a_full_collection_waits_for_idle_streams(monkeypatch, full_collections):
    monkeypatch.setattr(server, "IDLE_POLL_S", 0.001)

    async def serve():
        in_progress = [1]
        async with short_collections(lambda: in_progress[0]):
            full_collections.clear()
            kept = [[number] for number in range(100_000)]
            await asyncio.sleep(0.02)
            assert not full_collections
            in_progress[0] = 0
            async with asyncio.timeout(10):
                while not full_collections:
                    await asyncio.sleep(0.001)
            await asyncio.sleep(0.02)
            assert len(full_collections) == 1, "not again without new requests"
        assert kept

    asyncio.run(serve())


def test_full_collections_are_rare_if_idle_moments_are_frequent(monkeypatch, full_collections):
    monkeypatch.setattr(server, "IDLE_POLL_S", 0.001)
    monkeypatch.setattr(server, "MIN_REST", 1_000_000)
    in_progress = cycle([1, 0])

    async def serve():
        async with short_collections(lambda: next(in_progress)):
            full_collections.clear()
            await asyncio.sleep(0.1)
            assert len(full_collections) == 1

    asyncio.run(serve())


def test_a_full_collection_comes_in_time_if_streams_never_end(monkeypatch, full_collections):
    monkeypatch.setattr(server, "IDLE_POLL_S", 0.001)
    monkeypatch.setattr(server, "FULL_COLLECTION_S", 0.01)

    async def serve():
        async with short_collections(lambda: 1):
            full_collections.clear()
            async with asyncio.timeout(10):
                while len(full_collections) < 2:
                    await asyncio.sleep(0.001)

    asyncio.run(serve())
    assert len(full_collections) >= 2


def test_the_collector_is_as_before_afterwards():
    async def serve():
        before = gc.get_threshold()
        async with short_collections(lambda: 0):
            assert gc.get_threshold() != before
        assert gc.get_threshold() == before
        assert gc.get_freeze_count() == 0

    asyncio.run(serve())
