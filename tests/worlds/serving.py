"""A server over a small simulated fleet, and its client, in one event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import ClientError, ClientResponse, ClientTimeout, web
from aiohttp.test_utils import TestClient, TestServer

from experiments.app.settings.compose import Composition, ConfigSource, resolved
from experiments.app.settings.config_groups import config_dirs
from experiments.serve.command import prepare
from experiments.serve.driver import ServeJob, make_application
from experiments.serve.server import Stop
from experiments.serve.simulated.fleet import SimulatedFleet
from experiments.serve.simulated.session import FleetServer, FleetSession

FAST = ("time_scale=20", "serve.output_length=max_tokens")


def make_job(*overrides: str) -> FleetSession:
    """Returns the session of a simulated fleet."""
    source = ConfigSource(config_name="serve", dirs=config_dirs(None))
    given = [*FAST, *overrides]
    job = prepare(resolved(source.compose(given)), Composition(source, given))
    assert isinstance(job, ServeJob)
    assert isinstance(job.session, FleetSession)
    return job.session


def make_app(
    job: FleetSession, fleet: SimulatedFleet, api_key: str | None = None, stop: Stop | None = None
) -> web.Application:
    """Returns the application in front of a fleet."""
    return make_application(FleetServer(fleet, job.setup).served, job.setup, api_key, stop)


@asynccontextmanager
async def serving(*overrides: str, api_key: str | None = None) -> AsyncIterator[TestClient[Any, Any]]:
    """Serves, and yields a client."""
    job = make_job(*overrides)
    fleet = job.fleet()
    fleet.driver.start()
    server = TestServer(make_app(job, fleet, api_key), handler_cancellation=True)
    async with TestClient(server, timeout=ClientTimeout(total=600)) as client:
        yield client
    fleet.driver.stop()


def served(test: Callable[[TestClient[Any, Any]], Awaitable[None]], *overrides: str) -> None:
    """Runs a test with the client of a server."""

    async def run() -> None:
        async with serving(*overrides) as client:
            await test(client)

    asyncio.run(run())


def served_before_it_is_late(
    test: Callable[[TestClient[Any, Any]], Awaitable[None]], *overrides: str
) -> None:
    """Runs a test whose requests must come before a simulated time, on a busy machine with slower clocks."""
    for time_scale in (10, 2):
        try:
            return served(test, f"time_scale={time_scale}", *overrides)
        except AssertionError:
            pass  # the machine may have been busy
    return served(test, "time_scale=0.25", *overrides)


async def post(client: TestClient[Any, Any], path: str, body: Any, **more: Any) -> tuple[int, Any]:
    """Returns the status and the body of the response, as JSON if it is."""
    async with client.post(path, json=body, **more) as response:
        return response.status, await body_of(response)


async def get(client: TestClient[Any, Any], path: str, **more: Any) -> tuple[int, Any]:
    """Returns the status and the body of the response, as JSON if it is."""
    async with client.get(path, **more) as response:
        return response.status, await body_of(response)


async def body_of(response: ClientResponse) -> Any:
    text = await response.text()
    return json.loads(text) if response.content_type == "application/json" else text


async def complete(client: TestClient[Any, Any], prompt: Any = "hello", **fields: Any) -> tuple[int, Any]:
    """Returns the status and the body of a completion of 4 tokens."""
    headers = fields.pop("headers", None)
    return await post(
        client, "/v1/completions", {"prompt": prompt, "max_tokens": 4, **fields}, headers=headers
    )


async def streamed(client: TestClient[Any, Any], **fields: Any) -> AsyncIterator[dict[str, Any]]:
    """Yields the events of a streamed completion. Raises aiohttp.ClientError if the connection is cut."""
    headers = fields.pop("headers", None)
    body = {"prompt": "hello", "stream": True, **fields}
    async with client.post("/v1/completions", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: ") and b"[DONE]" not in line:
                yield json.loads(line[6:])


async def until_it_fails(
    events: AsyncIterator[dict[str, Any]], silence_s: float = 10.0
) -> tuple[list[dict[str, Any]], type[Exception] | None]:
    """Returns the events of a stream and the error that has ended it, TimeoutError after silence_s."""
    found = []
    try:
        while True:
            found.append(await asyncio.wait_for(anext(events), silence_s))
    except StopAsyncIteration:
        return found, None
    except (ClientError, TimeoutError) as error:
        return found, type(error)
