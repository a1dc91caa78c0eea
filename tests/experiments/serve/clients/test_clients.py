"""Other projects' clients against the simulated back end: they work, and their figures are ours.

A client reports what it has seen, the server's run folder what it has simulated, in the client's own
definitions (`metrics.dialect`). The tolerances are those of a busy machine.
"""

import csv
import json
import os
import subprocess

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("clients")]

MODEL = "llama-3.1-8b"
LATE_S = 0.02
"""Seconds by which the first token may be later at the client: its own time and the network's."""


def run(*command, **variables):
    """Runs a client to its end, without a network; returns its output."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"PYTHONPATH": "", "TRITON_INTERPRET": "0", **variables},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def check(seen_s, simulated, name, **tolerance):
    assert seen_s == pytest.approx(simulated[name]["mean_s"], **({"rel": 0.1} | tolerance)), name


def test_openai_package(server, program):
    script = f'''
from openai import OpenAI, NotFoundError, BadRequestError
client = OpenAI(base_url=URL + "/v1", api_key="none", max_retries=0)
assert [model.id for model in client.models.list()] == ["{MODEL}"]
chat = dict(model="{MODEL}", messages=[{{"role": "user", "content": "hello"}}])
whole = client.chat.completions.create(**chat, max_tokens=7, seed=3, extra_body={{"ignore_eos": True}})
stream = client.chat.completions.create(
    **chat, max_tokens=7, seed=3, stream=True, extra_body={{"ignore_eos": True}},
    stream_options={{"include_usage": True}},
)
*events, last = stream
assert "".join(event.choices[0].delta.content for event in events) == whole.choices[0].message.content
assert last.usage == whole.usage and whole.usage.completion_tokens == 7
several = client.completions.create(model="{MODEL}", prompt=["a", "b"], n=2, max_tokens=3, logprobs=1)
assert len(several.choices) == 4 and len(several.choices[0].logprobs.tokens) == 3
for wrong, error in ((dict(model="none"), NotFoundError), (dict(max_tokens=-1), BadRequestError)):
    try:
        client.chat.completions.create(**(chat | wrong))
    except error as found:
        assert found.body["message"]
    else:
        raise AssertionError(wrong)
print("all is well")
'''
    with server() as running:
        output = run(program("others", "python"), "-c", f"URL = {running.url!r}\n{script}")
        assert "all is well" in output


def test_guidellm(server, program, tokenizer_folder, tmp_path):
    guidellm, file = program("guidellm", "guidellm"), tmp_path / "guidellm.json"
    with server(f"serve.tokenizer={tokenizer_folder}", "replicas=2") as running:
        run(
            guidellm,
            "run",
            *("--backend", f"kind=openai_http,target={running.url}"),
            *("--profile", "kind=constant,rate=5", "--constraint", "kind=max_requests,count=40"),
            *("--data", "kind=synthetic_text,prompt_tokens=256,output_tokens=40"),
            *("--tokenizer", f"kind=hf_auto,model={tokenizer_folder}"),
            *("--output", f"kind=json,path={file}", "--disable-progress"),
        )
        simulated = running.summary()["dialects"]["guidellm"]
    metrics = json.loads(file.read_text())["benchmarks"][0]["metrics"]
    seen = {
        name: metrics[name]["successful"]["mean"] for name in metrics if name.endswith(("_ms", "latency"))
    }
    assert metrics["request_totals"]["errored"] == 0
    check(seen["time_to_first_token_ms"] / 1e3, simulated, "ttft", abs=LATE_S)
    check(seen["inter_token_latency_ms"] / 1e3, simulated, "per_token")
    check(seen["time_per_output_token_ms"] / 1e3, simulated, "per_token_with_first", abs=LATE_S / 40)
    check(seen["request_latency"], simulated, "e2e", abs=2 * LATE_S)


def test_aiperf(server, program, tokenizer_folder, tmp_path):
    aiperf, folder = program("aiperf", "aiperf"), tmp_path / "aiperf"
    with server(f"serve.tokenizer={tokenizer_folder}", "serve.output_length=max_tokens") as running:
        run(
            aiperf,
            "profile",
            *("-m", MODEL, "--url", running.url, "--endpoint-type", "chat", "--streaming"),
            *("--tokenizer", str(tokenizer_folder), "--concurrency", "4", "--request-count", "40"),
            *("--synthetic-input-tokens-mean", "256", "--output-tokens-mean", "40"),
            *("--artifact-dir", str(folder), "--ui-type", "none"),
        )
        simulated = running.summary()["dialects"]["aiperf"]
    seen = json.loads((folder / "profile_export_aiperf.json").read_text())
    assert seen["request_count"]["avg"] == 40
    # Its first requests open connections while it starts its workers, so the median is compared.
    assert seen["time_to_first_token"]["p50"] / 1e3 == pytest.approx(
        simulated["ttft"]["p50_s"], abs=2 * LATE_S
    )
    check(seen["inter_token_latency"]["avg"] / 1e3, simulated, "per_token", rel=0.15)


def test_vllm_bench_serve(server, program, tokenizer_folder, tmp_path):
    vllm = program("vllm", "vllm")
    with server("replicas=2") as running:
        run(
            vllm,
            *("bench", "serve", "--backend", "vllm", "--base-url", running.url, "--model", MODEL),
            *("--tokenizer", str(tokenizer_folder), "--dataset-name", "random", "--random-input-len", "256"),
            *("--random-output-len", "40", "--num-prompts", "40", "--request-rate", "5", "--ignore-eos"),
            *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "vllm.json"),
            *("--percentile-metrics", "ttft,tpot,itl,e2el", "--disable-tqdm"),
        )
        simulated = running.summary()["dialects"]["vllm_bench"]
    seen = json.loads((tmp_path / "vllm.json").read_text())
    assert seen["completed"] == 40
    assert seen["total_output_tokens"] == 40 * 40
    check(seen["mean_ttft_ms"] / 1e3, simulated, "ttft", abs=LATE_S)
    check(seen["mean_tpot_ms"] / 1e3, simulated, "per_token")
    check(seen["mean_itl_ms"] / 1e3, simulated, "gap")
    check(seen["mean_e2el_ms"] / 1e3, simulated, "e2e", abs=2 * LATE_S)


LOCUSTFILE = """
from locust import HttpUser, constant, task

class User(HttpUser):
    wait_time = constant(0)

    @task
    def chat(self):
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20, "ignore_eos": True}
        with self.client.post("/v1/chat/completions", json=body, catch_response=True) as response:
            tokens = response.json()["usage"]["completion_tokens"]
            response.success() if tokens == 20 else response.failure(f"{tokens} tokens")
"""


def test_locust(server, program, tmp_path):
    locust = program("others", "locust")
    (tmp_path / "locustfile.py").write_text(LOCUSTFILE)
    with server("replicas=4") as running:
        run(
            locust,
            *("-f", str(tmp_path / "locustfile.py"), "--headless", "-u", "20", "-r", "20", "-t", "5s"),
            *("--host", running.url, "--csv", str(tmp_path / "locust"), "--only-summary"),
        )
        summary = running.summary()
    with (tmp_path / "locust_stats.csv").open() as file:
        total = list(csv.DictReader(file))[-1]
    assert int(total["Failure Count"]) == 0
    assert summary["requests"]["finished"] >= int(total["Request Count"]) > 20
