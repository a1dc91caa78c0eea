"""Runs the HTTP server until it is told to stop, and drains it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiohttp import web

from experiments.serve.settings import Address
from sim.settings.errors import ConfigError

BACKLOG = 4096
POLL_S = 0.05


@contextmanager
def stop_on_signals() -> Iterator[asyncio.Event]:
    """Yields an event that Ctrl-C and SIGTERM set, in place of their usual effects."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
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


async def serve_app(
    app: web.Application,
    address: Address,
    stop: asyncio.Event,
    *,
    duration_s: float | None,
    drain_s: float,
    num_in_progress: Callable[[], int],
    on_ready: Callable[[str], None],
) -> None:
    """Serves until `stop` is set or duration_s have passed, then drains: it takes no new connection.

    drain_s: seconds to wait for requests in progress. on_ready: called with the URL. Raises
    ConfigError if the address cannot be used.
    """
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, address.host, address.port, backlog=BACKLOG)
    try:
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(
                f"host={address.host}, port={address.port}: cannot listen there: {error.strerror}; choose "
                "another port, or port=0 for any free one"
            ) from None
        port = runner.addresses[0][1]
        on_ready(f"http://{address.host}:{port}")
        try:
            await asyncio.wait_for(stop.wait(), duration_s)
        except TimeoutError:
            stop.set()
        await site.stop()
        deadline = asyncio.get_running_loop().time() + drain_s
        while num_in_progress() and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(POLL_S)
    finally:
        await runner.cleanup()
