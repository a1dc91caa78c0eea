"""Runs the HTTP server until it is told to stop, and drains it."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from experiments.serve.settings import Address
from experiments.serve.stop import POLL_S, Stop
from sim.settings.errors import ConfigError

BACKLOG = 4096


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


async def listen(app: web.Application, host: str, port: int, name: str = "port") -> tuple[web.AppRunner, str]:
    """Listens with an application; returns its runner, which the caller cleans up, and its URL.

    port: 0 for any free one. name: of the port, for messages. Raises ConfigError if the address cannot be
    used.
    """
    runner = web.AppRunner(
        app,
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=0.1,
        auto_decompress=False,  # as in vLLM; a small body could become a large one
        logger=_LOG,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, backlog=BACKLOG).start()
    except (OSError, OverflowError) as error:
        await runner.cleanup()
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"host={host}, {name}={port}: cannot listen there: {reason}; choose another port, or port=0 for "
            "any free one"
        ) from None
    return runner, f"http://{host}:{runner.addresses[0][1]}"


async def serve_app(
    app: web.Application,
    address: Address,
    stop: Stop,
    *,
    duration_s: float | None,
    drain_s: float,
    num_in_progress: Callable[[], int],
    on_ready: Callable[[str], None],
) -> None:
    """Serves until `stop` is set or duration_s have passed, then drains.

    While it drains, it still listens, and what refuses new requests is the application (`stop.py`). drain_s:
    seconds to wait for outputs and responses in progress. on_ready: called with the URL. Raises ConfigError
    if the address cannot be used.
    """
    runner, url = await listen(app, address.host, address.port)
    try:
        with short_collections():
            on_ready(url)
            await _until_drained(stop, duration_s, drain_s, num_in_progress)
    finally:
        await runner.cleanup()


@contextmanager
def short_collections() -> Iterator[None]:
    """Keeps the pauses of the garbage collector short meanwhile, as streams wait for them.

    What exists already is not searched again and again, and a collection comes after few new objects: one of
    50,000 objects, the number of the command line, takes some 6 ms.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(2000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


async def _until_drained(
    stop: Stop, duration_s: float | None, drain_s: float, num_in_progress: Callable[[], int]
) -> None:
    """Waits until `stop` is set or duration_s have passed, and then for what is in progress."""
    try:
        await asyncio.wait_for(stop.first.wait(), duration_s)
    except TimeoutError:
        stop.set()
    deadline = asyncio.get_running_loop().time() + drain_s
    while (num_in_progress() or stop.num_responses) and not stop.at_once.is_set():
        if asyncio.get_running_loop().time() >= deadline:
            break
        await asyncio.sleep(POLL_S)
