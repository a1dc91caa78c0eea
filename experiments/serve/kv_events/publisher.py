"""Sends batches of KV events over ZMQ, and repeats past batches for a subscriber that has missed some.

    PUB     [topic, sequence number, batch]                   numbers have 8 bytes, big-endian, from 0
    ROUTER  [number]  ->  [topic, number, batch] ... [b"", -1, b""]      the batches from a number on

Both are those of vLLM 0.32. A batch is sent by the thread that makes it, which takes some microseconds, as
ZMQ has threads of its own; requests to repeat are served by the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock
from time import time

import msgspec
import zmq
import zmq.asyncio

from experiments.serve.kv_events.cache_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from experiments.serve.kv_events.settings import KvEventsSettings, endpoint_of

END = (-1).to_bytes(8, "big", signed=True)
LINGER_MS = 200
"""Time for batches that are still to be sent when the publisher is closed."""

_LOG = logging.getLogger("windtunnel.serve")


class Publisher:
    """The sockets of one replica; must be made in an event loop.

    topic: in place of that of the settings. rank: data_parallel_rank of the batches. Raises ValueError if an
    endpoint cannot be used.
    """

    def __init__(self, settings: KvEventsSettings, replica: int, *, topic: str, rank: int) -> None:
        self._topic = topic.encode()
        self._rank = rank
        self.num_published = 0
        """Number of batches so far; also the number of the next one."""
        self._past: deque[tuple[int, bytes]] = deque(maxlen=settings.buffer_steps)
        self._lock = Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._router = zmq.asyncio.Socket(self._context, zmq.ROUTER)
        self._replay: asyncio.Task[None] | None = None
        self._socket.set_hwm(settings.hwm)
        endpoint, replay = endpoint_of(settings.endpoint, replica), settings.replay_endpoint
        self.replay_endpoint: str | None = None
        try:
            self.endpoint = _open(self._socket, "endpoint", endpoint, connect=settings.connect)
            if replay is not None:
                self.replay_endpoint = _open(self._router, "replay_endpoint", endpoint_of(replay, replica))
        except ValueError:
            self._close_sockets(linger_ms=0)
            raise
        if replay is not None:
            self._replay = asyncio.get_running_loop().create_task(self._serve())

    def publish(self, events: Sequence[BlockStored | BlockRemoved | AllBlocksCleared]) -> None:
        """Sends a batch; a subscriber that is too slow misses it."""
        payload = self._encoder.encode(EventBatch(time(), list(events), self._rank))
        with self._lock:
            number = self.num_published
            self._past.append((number, payload))
            self.num_published = number + 1
        self._socket.send_multipart((self._topic, number.to_bytes(8, "big"), payload), copy=True)

    async def close(self) -> None:
        """Closes the sockets; the thread that publishes must have ended."""
        if self._replay is not None:
            self._replay.cancel()
            with suppress(asyncio.CancelledError):
                await self._replay
        await asyncio.to_thread(self._close_sockets, linger_ms=LINGER_MS)

    def _close_sockets(self, *, linger_ms: int) -> None:
        """Closes the sockets; waits until batches are sent, at most linger_ms."""
        self._router.close(linger=0)
        self._socket.close(linger=linger_ms)
        self._context.term()

    async def _serve(self) -> None:
        """Serves requests to repeat, until it is cancelled."""
        router = self._router
        while True:
            frames = await router.recv_multipart()
            if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                _LOG.warning("A request to repeat KV events is not a number of 8 bytes and is ignored.")
                continue
            client, _, start = frames
            with self._lock:
                past = list(self._past)
            for number, payload in past:
                if number >= int.from_bytes(start, "big"):
                    frame = (client, b"", self._topic, number.to_bytes(8, "big"), payload)
                    await router.send_multipart(frame)
            await router.send_multipart((client, b"", b"", END, b""))


def _open(socket: zmq.Socket, name: str, endpoint: str, *, connect: bool = False) -> str:  # type: ignore[type-arg]
    """Opens a socket; returns its endpoint, with the port that it has got. Raises ValueError."""
    try:
        if connect:
            socket.connect(endpoint)
            return endpoint
        socket.setsockopt(zmq.IPV6, 1 if "[" in endpoint else 0)
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ValueError(
            f"serve.kv_events.{name}={endpoint}: cannot be used: {error.strerror}; choose another one, or "
            "port 0 for any free one"
        ) from None
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
