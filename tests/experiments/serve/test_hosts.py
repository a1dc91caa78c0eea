"""The names that a server answers to, the flags of vLLM, and names of the model for clients."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("aiohttp", reason="needs the extra serve: pip install 'windtunnel[serve]'")

from aiohttp.test_utils import TestClient, TestServer

from experiments.serve.command import without_flags
from experiments.serve.driver import make_application
from experiments.serve.settings import hosts_of
from experiments.serve.simulated.session import FleetServer
from sim.settings.errors import ConfigError
from tests.worlds.serving import complete, get, make_job, post, serving
from tests.worlds.socket_server import error_of, parsed, socket_server

TWO_MODELS = "++workload.models={llama-3.1-8b: 1, llama-3.1-70b: 1}"
OWN = ["localhost:8000", "127.0.0.1", "[::1]:80", "LOCALHOST", "localhost."]
FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.nip.io",
    "192.0.2.1",
    "[",
    "a@b",
]
PATHS = ["/sleep", "/server_info", "/health", "/v1/models", "/"]


@pytest.mark.parametrize("path", PATHS)
def test_on_loopback_only_names_of_this_machine_are_served(path):
    method = "POST" if path == "/sleep" else "GET"

    async def ask():
        async with serving() as client:

            async def status(**headers):
                async with client.request(method, path, headers=headers) as response:
                    return response.status

            return (
                [await status(Host=host) for host in OWN],
                [await status(Host=host) for host in FOREIGN],
                [await status(Origin=f"http://{host}") for host in ("localhost:3000", "127.0.0.1")],
                [await status(Origin=origin) for origin in ("http://evil.example", "null", "file://")],
            )

    own, foreign, own_pages, foreign_pages = asyncio.run(ask())
    assert set(own) == set(own_pages) == {200}
    assert set(foreign) == set(foreign_pages) == {403}


def test_other_names_are_settings():
    async def ask(*overrides):
        async with serving(*overrides) as client:
            answers = [await get(client, "/health", headers={"Host": host}) for host in ("my.proxy", "evil")]
            return [status for status, _ in answers]

    assert asyncio.run(ask("serve.allowed_hosts=[my.proxy]")) == [200, 403]
    assert asyncio.run(ask("serve.allowed_hosts=['*']")) == [200, 200]
    assert asyncio.run(ask("host=0.0.0.0")) == [200, 200]
    assert hosts_of("127.0.0.5", None) >= {"127.0.0.5", "localhost"}
    with pytest.raises(ConfigError, match="allowed_hosts"):
        make_job("serve.allowed_hosts=['']")


def test_each_port_of_a_replica_checks_names_too():
    async def ask():
        job = make_job("serve.expose=replicas", "replicas=2")
        fleet = job.fleet()
        fleet.driver.start()
        server, urls = FleetServer(fleet, job.setup), {}
        app = make_application(server.served, job.setup)
        async with TestClient(TestServer(app)), server.replica_ports(urls.__setitem__):
            port = int(urls[1].rsplit(":", 1)[1])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: evil\r\nConnection: close\r\n\r\n")
            answer = await reader.read()
            writer.close()
        fleet.driver.stop()
        return parsed(answer)[0]

    assert asyncio.run(ask()) == 403


def test_an_expectation_that_is_not_met_is_an_error_object():
    with socket_server() as server:
        status, answer = server.request("POST", "/v1/completions", b"{}", {"Expect": "nonsense"})
    assert (status, error_of(answer)["code"]) == (417, 417)


def test_flags_of_vllm_are_settings():
    line = "--host 0.0.0.0 --port=9 replicas=2 --model llama3_1_8b --served-model-name a b/c"
    assert without_flags(line.split()) == [
        "host=0.0.0.0",
        "port=9",
        "replicas=2",
        "model=llama3_1_8b",
        "serve.served_model_name=['a','b/c']",
    ]
    assert without_flags(["--model", "x/y", "--allowed-hosts", "*", "seed=1"]) == [
        "model=x/y",
        "serve.allowed_hosts=['*']",
        "seed=1",
        "serve.served_model_name=['x/y']",
    ]
    assert without_flags(["--help", "port=1"]) == ["--help", "port=1"]
    for words in (["--port"], ["--host", "--port", "1"], ["--model="]):
        with pytest.raises(ConfigError, match=words[0].rstrip("=")):
            without_flags(words)


def test_clients_use_the_names_that_the_model_is_served_by():
    async def ask():
        async with serving("serve.served_model_name=[mine, other/name]", "adapters=fixed_slots") as client:
            adapter = {"lora_name": "sql", "lora_path": "x"}
            assert (await post(client, "/v1/load_lora_adapter", adapter))[0] == 200
            _, models = await get(client, "/v1/models")
            names = ("mine", "other/name", "sql", "llama-3.1-8b")
            answers = [await complete(client, model=name) for name in names]
            return models, answers, (await get(client, "/metrics"))[1]

    models, answers, metrics = asyncio.run(ask())
    names = [(each["id"], each["parent"]) for each in models["data"]]
    assert names == [("mine", None), ("other/name", None), ("sql", "mine")]
    assert [status for status, _ in answers] == [200, 200, 200, 404]
    assert answers[1][1]["model"] == "other/name"
    assert 'model_name="mine"' in metrics
    with pytest.raises(ConfigError, match="served_model_name"):
        make_job("serve.served_model_name=[a]", "pools=two_models", "workload=callers", TWO_MODELS)
