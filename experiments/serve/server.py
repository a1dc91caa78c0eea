"""Runs the HTTP server until it is told to stop, by a signal or as its time is over, and drains it.

Requests in progress are served to their end first. Bytes that are no request are answered with an error
object, too.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from http import HTTPStatus
from math import ceil
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from experiments.serve.errors import FAILED, MAX_REASON_CHARS, ApiError
from experiments.serve.settings import Address
from sim.settings.errors import ConfigError

BACKLOG = 4096
LINGERING_S = 2.0
"""Time for which the rest of a body is read after its answer, so that a client that still sends reads it."""
IDLE_POLL_S = 0.5
FULL_COLLECTION_S = 600.0
MIN_REST = 100
"""Times that a full collection took before, until the next one at an idle moment: a hundredth of the time."""
INFORMATION_PATHS = ("/", "/metrics", "/version", "/load", "/v1/models", "/server_info")
"""Paths that a server also serves while it drains."""
POLL_S = 0.05


class NoTracebacksOfClients(logging.Filter):
    """Shortens what aiohttp logs of bytes that are no HTTP/1.1 to a line, and leaves out lost connections.

    Routers try HTTP/2 on every engine, and clients vanish: neither is an error of the server. Neither is the
    InvalidStateError of aiohttp for a response that ends just when the wait for it at the shutdown is over.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if isinstance(error, HttpProcessingError):
            record.exc_info, record.levelno, record.levelname = None, logging.INFO, "INFO"
            return _LOG.isEnabledFor(logging.INFO)
        return not isinstance(error, ConnectionError | asyncio.InvalidStateError)


_LOG = logging.getLogger("windtunnel.serve.http")
_LOG.addFilter(NoTracebacksOfClients())


class ErrorObjectProtocol(web.RequestHandler):
    """aiohttp's protocol, with JSON instead of plain text where it answers without the application."""

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Sends a response; a refusal of aiohttp's own, such as of an Expect, becomes an error object."""
        if isinstance(resp, web.HTTPException):
            error = ApiError(resp.reason, HTTPStatus(resp.status))
            resp = web.json_response(error.body(), status=resp.status)
        return await super().finish_response(request, resp, start_time)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Returns the error object of a request that could not be read or served; the connection ends."""
        super().handle_error(request, status, exc, message)  # writes the log; raises if a response has begun
        reason = FAILED
        if message is not None and status < HTTPStatus.INTERNAL_SERVER_ERROR:
            reason = f"This is no HTTP request: {' '.join(message.split())}"[:MAX_REASON_CHARS]
        response = web.json_response(ApiError(reason, HTTPStatus(status)).body(), status=status)
        response.force_close()
        return response


class Listener:
    """An application that listens on sockets, until `cleanup`."""

    def __init__(self, runner: web.AppRunner, sockets: asyncio.Server) -> None:
        self._runner = runner
        self._sockets = sockets

    async def cleanup(self) -> None:
        """Closes the sockets and all connections, and ends the application."""
        self._sockets.close()
        await self._runner.cleanup()


async def listen(app: web.Application, host: str, port: int, name: str = "port") -> tuple[Listener, str]:
    """Listens with an application; returns the listener, which the caller cleans up, and its URL.

    port: 0 for any free one. name: of the port, for messages. Raises ConfigError if the address cannot be
    used.
    """
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    loop, server = asyncio.get_running_loop(), runner.server
    assert server is not None
    settings: dict[str, Any] = {
        "access_log": None,
        "auto_decompress": False,  # as in vLLM; a small body could become a large one
        "logger": _LOG,
        "lingering_time": LINGERING_S,
    }
    protocol = partial(ErrorObjectProtocol, server, loop=loop, **settings)
    try:
        sockets = await loop.create_server(protocol, host, port, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        await runner.cleanup()
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"host={host}, {name}={port}: cannot listen there: {reason}; choose another port, or port=0 for "
            "any free one"
        ) from None
    return Listener(runner, sockets), f"http://{host}:{sockets.sockets[0].getsockname()[1]}"


async def serve_app(
    app: web.Application,
    address: Address,
    stop: Stop,
    *,
    duration_s: float | None,
    drain_s: float,
    num_in_progress: Callable[[], int],
    on_ready: Callable[[str], None],
    is_asleep: Callable[[], bool] = lambda: False,
) -> None:
    """Serves until `stop` is set or duration_s have passed, then drains.

    While it drains, it still listens, and what refuses new requests is the application. drain_s:
    seconds to wait for outputs and responses in progress. on_ready: called with the URL. is_asleep: whether
    nothing goes on, so that a wait would be in vain. Raises ConfigError if the address cannot be used.
    """
    listener, url = await listen(app, address.host, address.port)
    try:
        async with short_collections(num_in_progress):
            on_ready(url)
            await _until_drained(stop, duration_s, drain_s, num_in_progress, is_asleep)
    finally:
        await listener.cleanup()


@asynccontextmanager
async def short_collections(num_in_progress: Callable[[], int]) -> AsyncIterator[None]:
    """Keeps the pauses of the garbage collector short meanwhile, as streams wait for them.

    What exists already is not searched again, and the young generations are collected after so few objects
    that it takes about a millisecond. All other objects, whose number grows with the records and which take
    some 0.1 s, are collected when nothing is in progress any more, or after `FULL_COLLECTION_S`. With few
    requests such moments are frequent, and the next request would wait: `MIN_REST` keeps collections rare.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(200, 3, 1_000_000)
    task = asyncio.create_task(_collect_when_idle(num_in_progress))
    try:
        yield
    finally:
        task.cancel()
        gc.set_threshold(*before)
        gc.unfreeze()


async def _collect_when_idle(num_in_progress: Callable[[], int]) -> None:
    has_served, took_s, collected_s = False, 0.0, time.monotonic()
    while True:
        await asyncio.sleep(IDLE_POLL_S)
        is_busy = num_in_progress() > 0
        has_served |= is_busy
        begin_s = time.monotonic()
        rested_s = begin_s - collected_s
        is_due = has_served and not is_busy and rested_s > MIN_REST * took_s
        if is_due or rested_s > FULL_COLLECTION_S:
            gc.collect()
            collected_s = time.monotonic()
            took_s, has_served = collected_s - begin_s, False


async def _until_drained(
    stop: Stop,
    duration_s: float | None,
    drain_s: float,
    num_in_progress: Callable[[], int],
    is_asleep: Callable[[], bool],
) -> None:
    """Waits until `stop` is set or duration_s have passed, and then for what is in progress."""
    try:
        await asyncio.wait_for(stop.first.wait(), duration_s)
    except TimeoutError:
        stop.set()
    deadline = asyncio.get_running_loop().time() + drain_s
    while (num_in_progress() or stop.num_responses) and not stop.at_once.is_set():
        if asyncio.get_running_loop().time() >= deadline or is_asleep():
            break
        await asyncio.sleep(POLL_S)


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
    async def refuse(request: web.Request, handler: Handler) -> web.StreamResponse:
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
