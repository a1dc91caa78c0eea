"""A P/D router in front of prefill and decode replicas hands KV over with `kv_transfer_params`."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

pytest.importorskip("aiohttp", reason="needs the extra serve: pip install 'windtunnel[serve]'")

from aiohttp import ClientSession
from aiohttp.test_utils import TestClient, TestServer

from experiments.serve.driver import make_application
from experiments.serve.simulated.session import FleetServer
from sim.cluster.disaggregation import GONE
from sim.workload.base import WorkloadNotes
from tests.worlds.serving import complete, make_app, make_job, post

POOLS = ("model=llama3_1_8b", "pools=disaggregated", "serve.expose=replicas", "port=0")
PREFILL, DECODE = 0, 1
ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
PROMPT = [(place * 31) % 5000 for place in range(2000)]


class Served:
    def __init__(self, client, replicas, fleet):
        self.client, self.replicas, self.fleet = client, replicas, fleet

    def core(self, index):
        return self.fleet.simulation.replicas[index].core

    async def prefill(self, prompt=PROMPT, **fields):
        fields = {"max_tokens": 1, "kv_transfer_params": ASK, **fields}
        return await complete(self.replicas[PREFILL], prompt, **fields)

    async def idle(self):
        while any(self.core(index).num_unfinished for index in (PREFILL, DECODE)):
            await asyncio.sleep(0.005)


@asynccontextmanager
async def exposing(*overrides):
    job = make_job(*POOLS, *overrides)
    fleet = job.fleet()
    fleet.driver.start()
    server = FleetServer(fleet, job.setup)
    app = make_application(server.served, job.setup)
    replicas = {}

    def on_ready(index, url):
        replicas[index] = ClientSession(url)

    async with server.replica_ports(on_ready), TestClient(TestServer(app)) as client:
        yield Served(client, replicas, fleet)
        for session in replicas.values():
            await session.close()
    fleet.driver.stop()


def run(test, *overrides):
    async def whole():
        async with exposing(*overrides) as served:
            await test(served)

    asyncio.run(asyncio.wait_for(whole(), 120))


def test_kv_of_a_prefill_is_loaded_by_the_decode_replica():
    async def test(served):
        status, body = await served.prefill()
        assert status == 200
        assert body["usage"]["completion_tokens"] == 1
        params = body["kv_transfer_params"]
        assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
        assert len(params["remote_block_ids"][0]) == len(set(params["remote_block_ids"][0])) == 125
        assert params["remote_num_tokens"] == 2000
        assert len(served.core(PREFILL).leaving) == 1
        assert served.core(PREFILL).block_pool.num_used >= 125
        status, body = await complete(
            served.replicas[DECODE], PROMPT, max_tokens=8, kv_transfer_params=params
        )
        assert status == 200
        assert body["usage"]["completion_tokens"] == 8
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # none at the prefill replica
        await served.idle()
        assert not served.core(PREFILL).leaving
        served.core(PREFILL).check_integrity()
        served.core(DECODE).check_integrity()
        log = served.fleet.simulation.requests
        assert [log.replica[0], log.replica[1]] == [PREFILL, DECODE]
        links = served.fleet.simulation.replicas[DECODE].copies.links
        assert log.kv_transfer_bytes[1] == pytest.approx(1999 * links.bytes_per_token)
        assert 0 < log.kv_transfer_s[1] <= log.first_token_s[1] - log.arrival_s[1]
        assert log.output_tokens[0] == 1
        assert log.prefill_iterations[1] == 1  # the last token of the prompt

    run(test)


def test_a_request_through_the_protocol_takes_as_long_as_one_through_the_pools():
    """The decode replica computes one token more, and the client sends two requests."""

    async def test(served):
        assert (await complete(served.client, PROMPT, max_tokens=50))[0] == 200
        _, body = await served.prefill([token + 1 for token in PROMPT])
        params = body["kv_transfer_params"]
        other = [token + 1 for token in PROMPT]
        assert (await complete(served.replicas[DECODE], other, max_tokens=50, kv_transfer_params=params))[
            0
        ] == 200
        log = served.fleet.simulation.requests
        whole = log.finished_s[0] - log.arrival_s[0]
        parts = sum(log.finished_s[each] - log.arrival_s[each] for each in (1, 2))
        assert log.kv_transfer_s[2] == pytest.approx(log.kv_transfer_s[0], rel=0.01)
        assert parts == pytest.approx(whole, rel=0.1)

    run(test, "time_scale=1", "kv_transfer.transfer=at_end")


def test_kv_that_is_not_fetched_is_released_after_its_lease():
    async def test(served):
        _, body = await served.prefill()
        assert len(served.core(PREFILL).leaving) == 1
        await served.idle()
        assert served.fleet.simulation.kept_prefills.num_expired == 1
        assert served.core(PREFILL).block_pool.num_used == 0
        params = body["kv_transfer_params"]
        status, body = await complete(served.replicas[DECODE], PROMPT, kv_transfer_params=params)
        assert status == 500
        assert body["error"]["type"] == "InternalServerError"
        assert body["error"]["param"] == "kv_transfer_params.remote_request_id"

    run(test, "serve.kv_lease_duration_s=2")


def test_kv_is_fetched_once_and_freed_if_the_client_goes_away():
    async def test(served):
        _, body = await served.prefill()
        params = body["kv_transfer_params"]
        fields = {"max_tokens": 2000, "kv_transfer_params": params}
        ask = asyncio.create_task(complete(served.replicas[DECODE], PROMPT, **fields))
        while not served.core(DECODE).block_pool.num_used:
            await asyncio.sleep(0.005)
        assert (await complete(served.replicas[DECODE], PROMPT, kv_transfer_params=params))[0] == 500
        ask.cancel()
        await asyncio.gather(ask, return_exceptions=True)
        await served.idle()
        assert served.core(PREFILL).block_pool.num_used == 0
        assert served.core(DECODE).block_pool.num_used == 0

    run(test, "time_scale=1")


NEVER = ("failures=crash", "failures.events.0.at_s=1e9")  # the run is prepared for crashes


def crash(served, index):
    """Crashes a replica now, and brings it back after the requests that it has lost are told so."""
    simulation = served.fleet.simulation
    member = simulation.fleet.members[index]
    for request_id in simulation.fleet.crash(member, simulation.now):
        simulation._lost(request_id)
    simulation.fleet.restore(member, simulation.now)
    served.fleet.driver.wake()


async def hand_over_again(served):
    status, body = await served.prefill()
    assert status == 200
    params = body["kv_transfer_params"]
    assert (await complete(served.replicas[DECODE], PROMPT, kv_transfer_params=params))[0] == 200
    await served.idle()


def test_a_crash_of_the_prefill_replica_loses_the_kv_and_the_server_goes_on():
    async def test(served):
        _, body = await served.prefill()
        params = body["kv_transfer_params"]
        crash(served, PREFILL)
        assert (await complete(served.replicas[DECODE], PROMPT, kv_transfer_params=params))[0] == 500
        await hand_over_again(served)

    run(test, *NEVER)


def test_a_crash_of_the_prefill_replica_during_the_copy_fails_the_request():
    async def test(served):
        served.fleet.simulation._assembly.interconnect.set_reached(PREFILL, is_reached=False)
        _, body = await served.prefill()
        params = body["kv_transfer_params"]
        ask = asyncio.create_task(complete(served.replicas[DECODE], PROMPT, kv_transfer_params=params))
        while not served.core(DECODE).loading:
            await asyncio.sleep(0.005)
        served.fleet.simulation._assembly.interconnect.set_reached(PREFILL, is_reached=True)
        crash(served, PREFILL)
        status, body = await ask
        assert (status, body["error"]["message"]) == (503, GONE)
        assert served.core(DECODE).block_pool.num_used == 0
        await hand_over_again(served)

    run(test, *NEVER)


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_crash_of_the_decode_replica_fails_the_request_and_frees_the_kv(is_copied):
    async def test(served):
        interconnect = served.fleet.simulation._assembly.interconnect
        interconnect.set_reached(PREFILL, is_reached=is_copied)
        _, body = await served.prefill()
        fields = {"max_tokens": 4000, "kv_transfer_params": body["kv_transfer_params"]}
        ask = asyncio.create_task(complete(served.replicas[DECODE], PROMPT, **fields))
        while not (served.core(DECODE).decodes.size if is_copied else served.core(DECODE).loading):
            await asyncio.sleep(0.005)
        interconnect.set_reached(PREFILL, is_reached=True)
        crash(served, DECODE)
        assert (await ask)[0] == 503
        await hand_over_again(served)
        assert served.core(PREFILL).block_pool.num_used == 0

    run(test, *NEVER, "time_scale=1")


def test_many_kept_prefills_leave_nothing_behind_and_the_tables_are_whole():
    async def one(served, seed):
        prompt = [(seed * 17 + place) % 5000 for place in range(100 + 37 * (seed % 11))]
        status, body = await served.prefill(prompt)
        assert status == 200
        params = body["kv_transfer_params"]
        status, body = await complete(
            served.replicas[DECODE], prompt, max_tokens=10 + seed % 5, kv_transfer_params=params
        )
        assert (status, body["usage"]["completion_tokens"]) == (200, 10 + seed % 5)

    async def test(served):
        await asyncio.gather(*(one(served, seed) for seed in range(60)))
        assert (await complete(served.client, PROMPT))[0] == 200
        await served.idle()
        for index in (PREFILL, DECODE):
            served.core(index).check_integrity()
            assert not served.core(index).running
        records = served.fleet.simulation.close()
        assert (records.requests["status"] == "finished").all()
        assert len(records.requests) == 121
        result = served.fleet.scenario.result(records, WorkloadNotes())
        assert result.summary["requests"]["finished"] == 121 if "requests" in result.summary else True

    run(test)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 2}, "max_tokens"),
        ({"max_tokens": 1, "stream": True}, "stream"),
        ({"max_tokens": 1, "n": 2}, "kv_transfer_params"),
        ({"kv_transfer_params": 3}, "kv_transfer_params"),
        ({"kv_transfer_params": {"do_remote_decode": "perhaps"}}, "kv_transfer_params.do_remote_decode"),
        ({"kv_transfer_params": {**ASK, "do_remote_prefill": True}}, "kv_transfer_params"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
        ({"kv_transfer_params": {**ASK, "remote_port": 70000}}, "kv_transfer_params.remote_port"),
        ({"kv_transfer_params": {**ASK, "remote_block_ids": [-1]}}, None),
        ({"kv_transfer_params": {**ASK, "remote_host": 3}}, "kv_transfer_params.remote_host"),
    ],
)
def test_wrong_fields_are_errors_with_their_name(fields, param):
    async def test(served):
        status, body = await served.prefill(**fields)
        assert status == 400
        found = body["error"]["param"]
        assert found == param if param else found.startswith("kv_transfer_params.remote_block_ids")

    run(test)


def test_wrong_references_are_errors():
    async def test(served):
        _, body = await served.prefill()
        good = body["kv_transfer_params"]
        decode = served.replicas[DECODE]
        for change in (
            {"remote_engine_id": "another"},
            {"remote_request_id": "cmpl-none"},
            {"remote_request_id": "9" * 40},
            {"remote_request_id": "-1"},
        ):
            assert (await complete(decode, PROMPT, kv_transfer_params=good | change))[0] == 500
        status, body = await complete(decode, PROMPT[:-1], kv_transfer_params=good)
        assert (status, body["error"]["param"]) == (400, "prompt")
        assert (await complete(decode, PROMPT, kv_transfer_params=good))[0] == 200
        status, body = await complete(decode, PROMPT)  # a decode replica computes no prompts
        assert status == 400
        assert "send the request to a prefill replica with" in body["error"]["message"]

    run(test)


def test_a_fleet_without_prefill_pools_ignores_them_as_vllm_without_a_connector():
    async def whole():
        job = make_job("model=llama3_1_8b")
        fleet = job.fleet()
        fleet.driver.start()
        async with TestClient(TestServer(make_app(job, fleet))) as client:
            status, body = await complete(client, PROMPT, max_tokens=1, kv_transfer_params=ASK)
            assert status == 200
            assert "kv_transfer_params" not in body
        fleet.driver.stop()

    asyncio.run(whole())


def test_chat_completions_hand_over_too():
    async def test(served):
        ask = {"messages": [{"role": "user", "content": "word " * 300}]}
        path = "/v1/chat/completions"
        first = {**ask, "max_tokens": 1, "kv_transfer_params": ASK}
        status, body = await post(served.replicas[PREFILL], path, first)
        assert status == 200
        then = {**ask, "max_tokens": 5, "kv_transfer_params": body["kv_transfer_params"]}
        status, body = await post(served.replicas[DECODE], path, then)
        assert (status, body["usage"]["completion_tokens"]) == (200, 5)

    run(test)
