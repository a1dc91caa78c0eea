"""A simulated fleet behind the HTTP application, in the test's own process."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("pydantic")

from aiohttp.test_utils import TestClient, TestServer

from experiments.serve.http.app import make_app
from experiments.serve.settings import ServeSettings
from experiments.serve.simulated.build import build_fleet
from sim.settings.compose import ConfigSource
from sim.settings.config_groups import CONFIG_DIR
from sim.settings.scenario import build_scenario

SCENARIOS = {}


def scenario_of(*overrides):
    """Returns the scenario of some overrides, composed once."""
    if overrides not in SCENARIOS:
        source = ConfigSource(config_name="scenario", dirs=(CONFIG_DIR,))
        SCENARIOS[overrides] = build_scenario(source.compose(list(overrides)))
    return SCENARIOS[overrides]


class Client:
    """A client of the application. fleet: the back end."""

    def __init__(self, client, fleet):
        self.client = client
        self.fleet = fleet

    async def post(self, path, body, **headers):
        """Returns the status and the JSON of a response. body: sent as JSON, or as it is if it is bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | headers
        async with self.client.post(path, data=data, headers=headers) as response:
            return response.status, await response.json()

    async def get(self, path, **headers):
        async with self.client.get(path, headers=headers) as response:
            text = await response.text()
            return response.status, json.loads(text) if text else None

    async def stream(self, path, body):
        """Returns the events of a stream, the last of which is [DONE]."""
        async with self.client.post(path, json=body | {"stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            blocks = (await response.text()).split("\n\n")
        assert blocks[-2:] == ["data: [DONE]", ""]
        return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


@asynccontextmanager
async def serving(*overrides, time_scale=20.0, api_key=None, **settings):
    """Yields a client of a fleet that runs time_scale times faster than the wall clock."""
    fleet = build_fleet(scenario_of(*overrides), ServeSettings(**settings), time_scale)
    async with TestClient(TestServer(make_app(fleet, api_key))) as client:
        fleet.driver.start()
        yield Client(client, fleet)
        fleet.driver.stop()


@pytest.fixture
def served():
    """Runs a coroutine function with a client: `served(test, *overrides, **settings)`."""

    def run(test, *overrides, **settings):
        async def whole():
            async with serving(*overrides, **settings) as client:
                return await asyncio.wait_for(test(client), 60)

        return asyncio.run(whole())

    return run
