"""Measures the cost of the KV events of `windtunnel serve`: CPU time per batch, until it is sent.

    python -m experiments.bench.kv_events

A subscriber on this machine gets the batches. The CPU time of ZMQ's threads is included.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from statistics import median
from time import process_time, sleep

import zmq

from experiments.serve.kv_events.block_chain import BlockChain
from experiments.serve.kv_events.cache_events import CacheEvents
from experiments.serve.kv_events.publisher import Publisher
from experiments.serve.kv_events.settings import KvEventsSettings

BLOCK_SIZE = 16
NUM_BATCHES, NUM_RUNS = 400, 5


async def measured(nums_blocks: Sequence[int]) -> list[tuple[int, float, float]]:
    """Returns, by number of blocks, the microseconds to store and to remove them."""
    publisher = Publisher(KvEventsSettings(endpoint="tcp://127.0.0.1:0"), 0, topic="", rank=0)
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.connect(publisher.endpoint)
    subscriber.subscribe(b"")
    sleep(0.2)  # the subscription reaches the publisher
    rows = []
    for num_blocks in nums_blocks:
        runs = [_run(publisher, num_blocks) for _ in range(NUM_RUNS)]
        stored, removed = (median(column) for column in zip(*runs, strict=True))
        rows.append((num_blocks, stored, removed))
    subscriber.close(linger=0)
    context.term()
    await publisher.close()
    return rows


def _run(publisher: Publisher, num_blocks: int) -> tuple[float, float]:
    chains = {
        number: BlockChain(
            [(number * 7 + place) % 100_000 for place in range(BLOCK_SIZE * num_blocks)], BLOCK_SIZE
        )
        for number in range(NUM_BATCHES)
    }
    events = CacheEvents(chains)
    began_s = process_time()
    for number in chains:
        events.stored(number, 0, [(number, block) for block in range(num_blocks)])
        publisher.publish(events.take())
    stored_s = process_time()
    for number in chains:
        events.removed([(number, block) for block in reversed(range(num_blocks))])
        publisher.publish(events.take())
    us = 1e6 / NUM_BATCHES
    return (stored_s - began_s) * us, (process_time() - stored_s) * us


if __name__ == "__main__":
    for num_blocks, stored, removed in asyncio.run(measured((1, 8, 32, 128))):
        print(f"{num_blocks:4} blocks: stored in {stored:.0f} us, removed in {removed:.0f} us")
