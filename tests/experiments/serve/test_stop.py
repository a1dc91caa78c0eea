"""A server that is told to stop serves what it has begun, and refuses the rest with a status."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.request import urlopen

import pytest

pytest.importorskip("aiohttp", reason="needs the extra serve: pip install 'windtunnel[serve]'")

import aiohttp
from aiohttp import web

from experiments.serve.server import Stop, refusal_while_draining, serve_app
from experiments.serve.settings import Address
from tests.worlds.serving import make_app, make_job

BODY = {"prompt": "hello", "max_tokens": 400, "stream": True}


@asynccontextmanager
async def serving(drain_s: float) -> AsyncIterator[tuple[str, Stop]]:
    """Yields the URL of a server and its stop; then waits for the end of the server."""
    job, stop, ready = make_job("time_scale=10"), Stop(), asyncio.get_running_loop().create_future()
    fleet = job.fleet()
    fleet.driver.start()
    server = asyncio.create_task(
        serve_app(
            make_app(job, fleet, stop=stop),
            Address(port=0),
            stop,
            duration_s=None,
            drain_s=drain_s,
            num_in_progress=lambda: fleet.num_in_progress,
            on_ready=ready.set_result,
        )
    )
    yield await ready, stop
    await server
    fleet.driver.stop()


async def drained(
    *, drain_s: float, signals: int, max_tokens: int = 400
) -> tuple[int, dict[str, str], int, bool]:
    """Stops a server while it streams.

    Returns status and headers of a request that comes then, the status of /health, and whether the stream was
    complete.
    """
    is_whole = False
    async with (
        serving(drain_s) as (url, stop),
        aiohttp.ClientSession(url) as session,
        session.post("/v1/completions", json=BODY | {"max_tokens": max_tokens}) as streaming,
    ):
        await streaming.content.readline()
        stop.set()
        async with session.post("/v1/completions", json=BODY) as late:
            status, headers = late.status, dict(late.headers)
        async with session.get("/health") as health:
            health_status = health.status
        for _ in range(signals - 1):
            stop.set()
        try:
            async for line in streaming.content:
                is_whole = is_whole or b"[DONE]" in line
        except aiohttp.ClientError:
            pass
    return status, headers, health_status, is_whole


def test_a_draining_server_serves_what_it_has_begun_and_refuses_the_rest():
    status, headers, health, is_whole = asyncio.run(drained(drain_s=30.0, signals=1))
    assert (status, headers["Retry-After"], health) == (503, "30", 503)
    assert is_whole


def test_a_second_signal_ends_at_once():
    assert not asyncio.run(drained(drain_s=30.0, signals=2, max_tokens=50_000))[3]


def test_draining_ends_after_its_limit():
    assert not asyncio.run(drained(drain_s=1.0, signals=1, max_tokens=50_000))[3]


def test_streams_that_end_when_the_wait_for_them_is_over_log_no_error(caplog):
    """The loop stands still for 0.3 s, so that streams end in the same moment as the wait of the shutdown."""

    async def stream(session: aiohttp.ClientSession, max_tokens: int) -> None:
        body = BODY | {"max_tokens": max_tokens, "ignore_eos": True}
        async with session.post("/v1/completions", json=body) as response:
            await response.read()

    async def run() -> None:
        async with serving(30.0) as (url, stop), aiohttp.ClientSession(url) as session:
            streams = [asyncio.create_task(stream(session, 300 + 4 * i)) for i in range(40)]
            await asyncio.sleep(0.1)
            stop.set()
            stop.set()
            asyncio.get_running_loop().call_later(0.1, time.sleep, 0.3)
            await asyncio.gather(*streams, return_exceptions=True)

    asyncio.run(run())
    assert not [record for record in caplog.records if record.name.startswith("windtunnel.serve.http")]


def test_a_drained_server_sends_responses_that_are_read_slowly_to_their_end():
    num_bytes = 64 << 20  # more than the buffers of a connection
    num_begun: list[int] = []

    async def whole(request: web.Request) -> web.Response:
        num_begun.append(1)
        return web.Response(body=b"x" * num_bytes)

    found: list[int] = []

    def read(url: str) -> None:
        with urlopen(f"{url}/whole", timeout=30) as response:  # nosec B310
            time.sleep(0.5)  # longer than aiohttp itself waits for responses
            found.append(len(response.read()))

    async def run() -> threading.Thread:
        stop = Stop()
        app = web.Application(middlewares=[refusal_while_draining(stop, 30.0)])
        app.router.add_get("/whole", whole)

        def ready(url: str) -> None:
            client = threading.Thread(target=read, args=(url,))
            client.start()
            clients.append(client)

        clients: list[threading.Thread] = []
        server = serve_app(
            app,
            Address(port=0),
            stop,
            duration_s=None,
            drain_s=30.0,
            num_in_progress=lambda: 0,
            on_ready=ready,
        )
        serving_task = asyncio.create_task(server)
        while not num_begun:
            await asyncio.sleep(0.01)
        stop.set()
        await serving_task
        return clients[0]

    asyncio.run(run()).join()  # the loop of the server has ended, too
    assert found == [num_bytes]
