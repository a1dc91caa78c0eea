"""The end of a server: a signal, or its time is over; requests in progress are served to their end first."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from math import ceil

from aiohttp import web
from aiohttp.typedefs import Middleware

from experiments.serve.errors import ApiError

INFORMATION_PATHS = ("/", "/metrics", "/version", "/load", "/v1/models", "/server_info")
"""Paths that a server also serves while it drains."""
POLL_S = 0.05

Next = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Stop:
    """A request to end a server: `first`, after the requests in progress; `at_once`, without waiting."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.at_once = asyncio.Event()
        self.num_responses = 0
        """Responses that clients do not have as a whole."""

    def set(self) -> None:
        """Begins to drain; called again, ends at once."""
        if self.first.is_set():
            self.at_once.set()
        self.first.set()


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Yields a stop that Ctrl-C and SIGTERM set, in place of their usual effects."""
    loop, stop = asyncio.get_running_loop(), Stop()
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {each: signal.getsignal(each) for each in signals}
    for each in signals:
        loop.add_signal_handler(each, stop.set)
    try:
        yield stop
    finally:
        for each in signals:
            loop.remove_signal_handler(each)
            signal.signal(each, before[each])


def refusal_while_draining(stop: Stop, drain_s: float) -> Middleware:
    """Returns the middleware that counts responses, and refuses new requests once a server drains.

    The server keeps listening, so that clients and load balancers see a status in place of a refused
    connection. A request that came before goes on.
    """

    @web.middleware
    async def refuse(request: web.Request, handler: Next) -> web.StreamResponse:
        if stop.first.is_set() and request.path not in INFORMATION_PATHS:
            raise ApiError(
                "the server is shutting down",
                HTTPStatus.SERVICE_UNAVAILABLE,
                headers={"Retry-After": str(max(1, ceil(drain_s))), "Connection": "close"},
            )
        if request.path in INFORMATION_PATHS:
            return await handler(request)
        stop.num_responses += 1
        try:
            response = await handler(request)
            await _send(request, response)
            return response
        finally:
            stop.num_responses -= 1

    return refuse


async def _send(request: web.Request, response: web.StreamResponse) -> None:
    """Sends a response up to its last byte, as far as the client reads."""
    await response.prepare(request)
    await response.write_eof()
    while (transport := request.transport) is not None and transport.get_write_buffer_size():
        await asyncio.sleep(POLL_S)
