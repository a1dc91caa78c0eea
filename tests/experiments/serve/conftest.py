"""A simulated fleet behind the HTTP application, in the test's own process; a server in its own."""

import asyncio
import json
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager
from time import sleep
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("pydantic")

from aiohttp.test_utils import TestClient, TestServer

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.serve.http.app import make_app
from experiments.serve.settings import ServeSettings
from experiments.serve.simulated.session import build_fleet
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
                return await asyncio.wait_for(test(client), 600)

        return asyncio.run(whole())

    return run


class ServerProcess:
    """A running `windtunnel serve`, and its run folder once it has stopped.

    replica_urls: with serve.expose=replicas, by index.
    """

    def __init__(self, url, replica_urls, process, folder):
        self.url = url
        self.replica_urls = replica_urls
        self.process = process
        self.folder = folder

    def post(self, path, body):
        """Returns the text of a response, however long it takes."""
        with self.open(path, body) as response:
            return response.read().decode()

    def open(self, path, body):
        """Returns the open response to a POST request."""
        headers = {"Content-Type": "application/json"}
        return urlopen(Request(f"{self.url}{path}", json.dumps(body).encode(), headers), timeout=240)

    def wait(self):
        """Returns when the server serves requests."""
        for _ in range(2400):
            try:
                with urlopen(f"{self.url}/health", timeout=60):
                    return
            except HTTPError:
                sleep(0.1)
            except URLError as error:
                assert self.process.poll() is None, f"the server has ended with {self.process.returncode}"
                raise AssertionError(f"the server cannot be reached: {error.reason}") from error
        raise AssertionError("the server is not ready after four minutes")

    def summary(self):
        """Stops the server and returns the figures of its run."""
        self.process.terminate()
        output, _ = self.process.communicate(timeout=240)
        assert self.process.returncode == 0, f"the server has ended with {self.process.returncode}: {output}"
        return json.loads((self.folder / "summary.json").read_text())


@pytest.fixture
def server(tmp_path):
    """Starts servers: `with server(*overrides) as running`."""

    @contextmanager
    def start(*overrides):
        folder = tmp_path / "run"
        command = [sys.executable, "-m", "experiments.app.cli", "serve", "port=0", "output.report=false"]
        settings = ["metrics.dialect=all", f"hydra.run.dir={folder}", *overrides]
        process = subprocess.Popen([*command, *settings], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
        try:
            urls = {}
            for line in process.stdout:
                url, _, what = line.partition("  (")
                urls[what.rstrip(")\n")] = url
                if what.startswith("Ctrl-C"):
                    break
            assert urls, "the server has not started"
            names = [f"replica {index}" for index in range(len(urls) - 1)]
            running = ServerProcess(url, [urls[name] for name in names], process, folder)
            running.wait()
            yield running
        finally:
            process.kill()
            process.communicate()

    return start
