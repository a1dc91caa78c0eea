"""`windtunnel serve backend=engine replicas=2`: several engines behind the gateway of the simulator."""

import asyncio
import os
import signal

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("aiohttp")
pytest.importorskip("tokenizers", reason="text needs the package tokenizers")

from aiohttp.test_utils import TestClient, TestServer

from experiments.serve.driver import make_application
from experiments.serve.engine.result import result_of
from policies.admission.queue_bound import QueueBound
from policies.routing.load_balancing import LeastOutstanding
from policies.scaling.reactive import QueueLength
from realengine.serving.llm import LLM
from realengine.serving.sampling_params import SamplingParams
from sim.metrics.output import check_conservation
from sim.settings.errors import ConfigError
from tests.experiments.serve.conftest import Client
from tests.experiments.serve.engine.test_job import TINY, prepared

FLEET = (*TINY, "caching=prefix", "output.report=false", "replicas=2", "routing=least_outstanding")
LONG = {"max_tokens": 60, "ignore_eos": True, "temperature": 0}


def serve(job, test):
    """Runs a coroutine function with a client of a job; returns its result and the summary of the session."""

    async def whole():
        backend = job.backend()
        async with TestClient(TestServer(make_application(job.front(backend), job.setup))) as client:
            found = Client(client, backend)
            recorder = job.observed(backend, await backend.start())
            backend.open()
            try:
                result = await asyncio.wait_for(test(found, backend.llm()), 120)
            finally:
                await backend.stop()
        return result, recorder

    result, recorder = asyncio.run(whole())
    records = result_of(job.scenario, recorder, is_known_machine=False, has_iterations=False)
    check_conservation(records.records)
    return result, records


def test_the_scenario_gives_the_settings_of_the_gateway():
    job = prepared(*FLEET, "admission=queue_bound", "recovery=tokens", "max_resends=3", "signal_age_s=0.2")
    gateway = job.gateway
    assert isinstance(gateway.routing, LeastOutstanding)
    assert isinstance(gateway.admission, QueueBound)
    assert (gateway.max_resends, gateway.keeps_tokens, gateway.signal_age_s) == (3, True, 0.2)
    assert prepared(*TINY).gateway is None
    scaled = prepared(*TINY, "scaling=queue_length", "serve.engine.enable_sleep_mode=true").gateway
    assert isinstance(scaled.scaling, QueueLength)
    assert scaled.sleep_level == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["routing=nearest"], "nearest"),
        (["routing=weighted", "routing.weights=[1,2,3]"], "weights"),
        (["recovery=kv"], "recovery=kv"),
        (["prediction=oracle_with_noise", "routing=length_aware"], "prediction"),
        (["failures=crash"], "failures"),
        (["scaling=slo_attainment"], "scaling=slo_attainment"),
        (["retries=exponential_backoff"], "retries"),
        (["pools=disaggregated"], "pools"),
        (["serve.kv_events.enable_kv_cache_events=true"], "KV events"),
    ],
    ids=lambda each: each[-1] if isinstance(each, list) else "",
)
def test_settings_that_no_fleet_has_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        prepared(*FLEET, *words)


def test_an_engine_is_killed_and_every_client_gets_its_answer():
    """Also the tables, the metrics and the health are those of a service that lost one engine."""
    job = prepared(*FLEET, "recovery=tokens")
    texts = [f"{number} little engines" for number in range(6)]

    async def test(client, fleet):
        asked = [client.post("/v1/completions", LONG | {"prompt": text}) for text in texts]
        answers = [asyncio.create_task(each) for each in asked]
        while not fleet.fleet.replicas[1].num_outstanding or not all(
            own.outputs[0].tokens for own in fleet._requests.values()
        ):
            await asyncio.sleep(0.002)
        os.kill(fleet.fleet.replicas[1].process.process.pid, signal.SIGKILL)
        found = await asyncio.gather(*answers)
        status, _ = await client.get("/health")
        async with client.client.get("/metrics") as response:
            return found, status, await response.text()

    (found, status, metrics), result = serve(job, test)
    llm = LLM(job.served.model, device="cpu", dtype="float32", num_kv_blocks=200, seed=job.engine.seed)
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0)
    expected = [output.outputs[0].text for output in llm.generate(texts, params)]
    assert [code for code, _ in found] == [200] * 6
    assert [body["choices"][0]["text"] for _, body in found] == expected
    assert status == 200
    lines = [line for line in metrics.splitlines() if line.startswith("vllm:generation_tokens_total{")]
    assert sum(float(line.rpartition(" ")[2]) for line in lines) == 6 * 60
    assert [line.partition("}")[0].count('engine="') for line in lines] == [1, 1]
    summary = result.summary
    assert summary["requests"]["finished"] == 6
    assert summary["troubles"]["crashes"] == 1
    assert summary["gpu_busy"] is summary["kv"]["peak_use_share"] is None
    assert result.records.num_resends == 3
    assert result.records.requests["output_tokens"].tolist() == [60] * 6
    assert sorted(result.records.requests["attempts"]) == [1, 1, 1, 2, 2, 2]


def test_a_stream_that_would_begin_again_is_cut():
    job = prepared(*FLEET)

    async def test(client, fleet):
        body = LONG | {"prompt": "two", "stream": True}
        async with client.client.post("/v1/completions", json=body) as response:
            await response.content.readline()
            [index] = [each.index for each in fleet.fleet.replicas if each.num_outstanding]
            os.kill(fleet.fleet.replicas[index].process.process.pid, signal.SIGKILL)
            rest = b""
            try:
                rest = await response.content.read()
            except Exception as error:
                return type(error).__name__, rest
            return "", rest

    (error, rest), result = serve(job, test)
    assert error or b"[DONE]" not in rest
    assert result.summary["requests"]["finished"] == 0
