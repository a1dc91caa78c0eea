"""Each replica has a port of its own, behind which it is a single engine; full queues refuse requests."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager

import pytest

pytest.importorskip("aiohttp", reason="needs the extra serve: pip install 'windtunnel[serve]'")
pytest.importorskip("prometheus_client", reason="needs the extra serve: pip install 'windtunnel[serve]'")

from aiohttp import ClientSession
from aiohttp.test_utils import TestClient, TestServer

from experiments.serve.driver import make_application
from experiments.serve.simulated.replicas import NOT_TAKEN
from experiments.serve.simulated.session import FleetServer
from sim.settings.errors import ConfigError
from tests.experiments.serve.test_metrics import Scrape
from tests.worlds.serving import complete, get, make_job, post, served

PREFIX = "a long preamble that many prompts share " * 10


@asynccontextmanager
async def exposing(*overrides):
    """Yields the client of a fleet, the clients of its replicas, and the fleet."""
    job = make_job("model=llama3_1_8b", "serve.expose=replicas", "port=0", *overrides)
    fleet = job.fleet()
    fleet.driver.start()
    server = FleetServer(fleet, job.setup)
    app = make_application(server.served, job.setup)
    replicas = {}

    def on_ready(index, url):
        replicas[index] = ClientSession(url)

    async with server.replica_ports(on_ready), TestClient(TestServer(app)) as client:
        yield client, replicas, fleet
        for session in replicas.values():
            await session.close()
    fleet.driver.stop()


async def scrape(client):
    return Scrape((await get(client, "/metrics"))[1])


def test_a_request_goes_to_the_replica_of_its_port():
    async def run():
        async with exposing("replicas=3", "routing=round_robin") as (client, replicas, _):
            for _ in range(4):
                assert (await complete(replicas[1]))[0] == 200
            for _ in range(3):
                assert (await complete(client))[0] == 200
            by_index = [replicas[index] for index in range(3)]
            counts = [(await scrape(each)).total("request_success_total") for each in (client, *by_index)]
            assert counts == [7, 1, 5, 1]
            assert (await get(replicas[2], "/load"))[1] == {"server_load": 0}
            assert (await get(replicas[2], "/v1/models"))[1]["data"][0]["id"] == "llama-3.1-8b"
            of_one = await scrape(replicas[2])
            labels = {sample.labels["engine"] for sample in of_one.samples if "engine" in sample.labels}
            assert labels == {"2"}

    asyncio.run(run())


def test_prefixes_meet_at_a_replica_if_the_router_in_front_sends_them_there():
    """A router that reads nothing but /metrics and sends equal prompts to one place sees the hits."""

    async def run():
        async with exposing("replicas=2", "caching=prefix") as (_, replicas, _):
            for session in range(4):
                for turn in range(3):
                    loads = [(await scrape(each)).total("num_requests_running") for each in replicas.values()]
                    assert loads == [0, 0]
                    status, _ = await complete(replicas[session % 2], f"{PREFIX * (session + 1)} {turn}")
                    assert status == 200
            for each in replicas.values():
                found = await scrape(each)
                hits, queries = (found.total(f"prefix_cache_{name}_total") for name in ("hits", "queries"))
                assert hits > 0.6 * queries

    asyncio.run(run())


def test_a_replica_that_is_down_is_unhealthy_and_refuses():
    crash = ("failures=crash", "failures.events.0.at_s=0.2", "failures.events.0.replicas=[1]")
    for_ever = "failures.events.0.duration_s=1e6"

    async def run():
        async with exposing("replicas=2", *crash, for_ever) as (client, replicas, _):
            while (await get(replicas[1], "/health"))[0] == 200:
                await asyncio.sleep(0.01)
            assert (await get(replicas[0], "/health"))[0] == 200
            status, body = await complete(replicas[1])
            assert status == 503
            assert body["error"]["message"] == NOT_TAKEN
            assert (await complete(replicas[0]))[0] == 200
            assert (await complete(client))[0] == 200
            assert (await scrape(replicas[1])).total("admission_rejections_total", reason=NOT_TAKEN) == 1
            assert (await scrape(replicas[0])).total("admission_rejections_total") == 0
            assert (await scrape(client)).total("admission_rejections_total") == 1

    asyncio.run(run())


def test_a_replica_that_starts_later_gets_a_port():
    async def run():
        async with exposing("replicas=1") as (_, replicas, fleet):
            members = fleet.simulation.fleet
            member = members.start(0, fleet.simulation.now)
            while len(replicas) < 2:
                await asyncio.sleep(0.01)
            late = replicas[1]
            assert (await get(late, "/health"))[0] == 503
            members.ready(member, fleet.simulation.now)
            assert (await get(late, "/health"))[0] == 200
            assert (await complete(late))[0] == 200
            assert (await scrape(late)).total("request_success_total") == 1

    asyncio.run(run())


def test_a_port_in_use_is_an_error_of_the_user():
    async def run():
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1] - 1
            job = make_job("model=llama3_1_8b", "serve.expose=replicas", f"port={port}")
            fleet = job.fleet()
            fleet.driver.start()
            server = FleetServer(fleet, job.setup)
            with pytest.raises(ConfigError, match=r"port of replica 0=.*cannot listen there"):
                async with server.replica_ports(lambda index, url: None):
                    pass
            fleet.driver.stop()

    asyncio.run(run())


def test_a_full_queue_refuses_requests():
    async def test(client):
        replies = await asyncio.gather(*(complete(client, max_tokens=400) for _ in range(10)))
        refused = [body for status, body in replies if status == 503]
        found = await scrape(client)
        reason = "the queue is full (max_waiting=2)"
        assert 6 <= len(refused) <= 8
        assert {status for status, _ in replies} == {200, 503}
        assert all(body["error"]["message"] == reason for body in refused)
        assert found.total("admission_rejections_total", reason=reason) == len(refused)
        assert found.total("request_success_total") == 10 - len(refused)
        assert (await complete(client))[0] == 200

    served(test, "model=llama3_1_8b", "serve.max_waiting=2", "engine.max_num_seqs=1")


def test_a_refusal_of_an_admission_policy_is_a_503():
    async def test(client):
        replies = await asyncio.gather(*(complete(client, max_tokens=400) for _ in range(6)))
        assert sorted(status for status, _ in replies) == [200, 200, 503, 503, 503, 503]
        found = await scrape(client)
        assert found.total("admission_rejections_total", reason="queue bound of the replica") == 4

    served(test, "model=llama3_1_8b", "admission=queue_bound", "admission.max_outstanding=2")


@pytest.mark.parametrize(
    ("override", "message"),
    [("serve.max_waiting=0", "must be >= 1 request"), ("serve.expose=engines", "serve.expose=engines")],
)
def test_rejects_settings(override, message):
    with pytest.raises(ConfigError, match=message):
        make_job(override)


def test_adapters_are_in_the_metrics_of_the_replica_that_serves_them():
    async def run():
        async with exposing("replicas=2", "adapters=fixed_slots", "time_scale=1") as (client, replicas, _):
            load = {"lora_name": "sql", "lora_path": "/nowhere"}
            assert (await post(client, "/v1/load_lora_adapter", load))[0] == 200
            names = [model["id"] for model in (await get(replicas[1], "/v1/models"))[1]["data"]]
            assert "sql" in names
            ask = asyncio.create_task(complete(replicas[1], model="sql", max_tokens=100_000))

            async def running(index):
                samples = (await scrape(replicas[index])).samples
                (info,) = (each for each in samples if each.name == "vllm:lora_requests_info")
                return info.labels["running_lora_adapters"], info.labels["max_lora"]

            while not (await running(1))[0]:
                await asyncio.sleep(0.02)
            assert (await running(1))[0] == "sql"
            assert int((await running(1))[1]) > 0
            assert (await running(0))[0] == ""
            ask.cancel()
            await asyncio.gather(ask, return_exceptions=True)

    asyncio.run(run())


@pytest.mark.parametrize(
    "limit",
    [
        ("serve.max_waiting=1",),
        ("admission=queue_bound", "admission.max_outstanding=1", "admission.per=fleet"),
    ],
)
def test_refusals_are_in_the_metrics_of_the_replica_that_was_asked(limit):
    async def run():
        settings = ("replicas=2", "engine.max_num_seqs=1", "time_scale=1", *limit)
        async with exposing(*settings) as (client, replicas, _):
            asks = [asyncio.create_task(complete(replicas[1], max_tokens=3000)) for _ in range(6)]
            await asyncio.wait(asks, return_when=asyncio.FIRST_COMPLETED, timeout=20)
            await asyncio.sleep(0.3)
            refused = [ask.result() for ask in asks if ask.done()]
            assert refused
            assert {status for status, _ in refused} == {503}
            reason = refused[0][1]["error"]["message"]
            of_one, of_other = await scrape(replicas[1]), await scrape(replicas[0])
            assert of_one.total("admission_rejections_total", reason=reason) == len(refused)
            assert of_other.total("admission_rejections_total") == 0
            assert (await scrape(client)).total("admission_rejections_total") == len(refused)
            for ask in asks:
                ask.cancel()
            await asyncio.gather(*asks, return_exceptions=True)

    asyncio.run(run())
