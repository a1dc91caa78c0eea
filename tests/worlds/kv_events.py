"""A subscriber of KV events that keeps an index of them, as a router does."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from experiments.serve.kv_events.block_chain import BlockChain
from experiments.serve.kv_events.publisher import Publisher


def decoded(payload: bytes) -> list[Any]:
    """Returns a batch as plain lists and dicts."""
    found: list[Any] = msgspec.msgpack.decode(payload)
    return found


class KnownBlocks:
    """The blocks of one replica, as its events tell, by medium: hash -> parent and tokens."""

    def __init__(self, socket: zmq.asyncio.Socket, publisher: Publisher) -> None:
        self._socket = socket
        self._publisher = publisher
        self.blocks: dict[str, dict[int, tuple[int | None, tuple[int, ...]]]] = {}
        self.batches: list[list[Any]] = []
        self.topics: list[bytes] = []
        self.num_removed = self.num_cleared = 0
        self.next_number = 0
        self.came_late = False  # whether blocks were stored before the subscription

    @classmethod
    async def subscribe(
        cls, context: zmq.asyncio.Context, publisher: Publisher, topic: str = ""
    ) -> KnownBlocks:
        """Subscribes; returns when the subscription has reached the publisher."""
        socket = context.socket(zmq.SUB)
        socket.connect(publisher.endpoint)
        socket.subscribe(b"")
        known = cls(socket, publisher)
        number = 0
        while not await socket.poll(20):  # empty batches, until one comes
            publisher.publish([])
            number += 1
            assert number < 500, "no message comes"
        await known.catch_up()
        known.batches.clear()
        return known

    async def catch_up(self) -> None:
        """Reads the messages that were published until now."""
        last = self._publisher.num_published
        while self.next_number < last:
            topic, number, payload = await asyncio.wait_for(self._socket.recv_multipart(), 20)
            assert int.from_bytes(number, "big") >= self.next_number
            assert not self.batches or int.from_bytes(number, "big") == self.next_number, "a message is lost"
            self.next_number = int.from_bytes(number, "big") + 1
            self.topics.append(topic)
            self.apply(decoded(payload))

    def apply(self, batch: list[Any]) -> None:
        """Applies a batch. Asserts that nothing is stored twice or removed without being there."""
        self.batches.append(batch)
        for event in batch[1]:
            if event["type"] == "AllBlocksCleared":
                self.num_cleared += 1
                self.blocks.clear()
                continue
            held = self.blocks.setdefault(event["medium"], {})
            if event["type"] == "BlockRemoved":
                self.num_removed += len(event["block_hashes"])
                for block_hash in event["block_hashes"]:
                    assert block_hash in held or self.came_late, "a block was removed that was never stored"
                    held.pop(block_hash, None)
                continue
            parent, size = event["parent_block_hash"], event["block_size"]
            for place, block_hash in enumerate(event["block_hashes"]):
                assert block_hash not in held, "a block was stored twice"
                tokens = tuple(event["token_ids"][place * size : (place + 1) * size])
                assert len(tokens) == size
                held[block_hash] = parent, tokens
                parent = block_hash

    def hashes(self, medium: str) -> set[int]:
        return set(self.blocks.get(medium, ()))

    def num_found(self, medium: str, chain: BlockChain, num_tokens: int) -> int:
        """Counts the first blocks of a request, of those of num_tokens tokens, that the replica has."""
        held = self.blocks.get(medium, {})
        num_blocks = num_tokens // chain.block_size
        return next((n for n in range(num_blocks) if chain.external_hash(n) not in held), num_blocks)
