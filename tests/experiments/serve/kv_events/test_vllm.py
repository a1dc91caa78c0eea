"""vLLM's own classes decode the events, and its own functions give the same hashes."""

import json
import os
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("msgspec", reason="needs the extra serve: pip install 'windtunnel[serve]'")

import msgspec

from experiments.serve.kv_events.block_chain import BlockChain
from experiments.serve.kv_events.cache_events import CacheEvents, EventBatch

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module")
def vllm_python():
    """Returns the Python of an environment with vLLM, or skips the test."""
    given = os.environ.get("WINDTUNNEL_VLLM_PYTHON")
    found = [Path(given)] if given else sorted(ROOT.glob(".venv-parity/*/bin/python"))
    if not found or not (found[-1].parent / "vllm").exists():
        pytest.skip("no environment with vLLM; `make parity` makes one")
    return str(found[-1])


TOKENS = [*range(100, 140), 0, 300, 70_000, 128_255, 5]
CASES = [(None, ""), (None, "mine"), (("sql", "/adapters/sql"), ""), (("sql", "sql"), "mine")]


def make_case(lora, salt):
    """Returns what the script is asked, and the blocks that it is about."""
    name, path = lora or (None, "")
    number = None if name is None else 2
    chain = BlockChain(TOKENS, 16, lora=name, lora_number=number, lora_path=path, cache_salt=salt)
    events = CacheEvents({7: chain})
    events.stored(7, 0, ["one", "two"])
    events.stored_below("host", ["one", "two"])
    events.removed(["two"])
    payload = msgspec.msgpack.encode(EventBatch(12.5, events.take(), 3))
    return {
        "payload": payload.hex(),
        "token_ids": TOKENS,
        "block_size": 16,
        "lora": lora,
        "salt": salt,
    }, chain


@pytest.mark.slow
def test_vllm_reads_our_events_and_has_our_hashes(vllm_python):
    cases = [make_case(*case) for case in CASES]
    run = subprocess.run(
        [vllm_python, str(Path(__file__).with_name("vllm_script.py"))],
        input=json.dumps([asked for asked, _ in cases]),
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"},
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    for (lora, salt), (_, chain), found in zip(
        CASES, cases, json.loads(run.stdout.splitlines()[-1]), strict=True
    ):
        check(lora, salt, chain, found)


def check(lora, salt, chain, found):
    name = None if lora is None else lora[0]
    assert (found["ts"], found["rank"]) == (12.5, 3)
    assert found["hashes"] == [chain.external_hash(0), chain.external_hash(1)]
    stored, below, removed = found["events"]
    assert [event["type"] for event in found["events"]] == ["BlockStored", "BlockStored", "BlockRemoved"]
    assert stored["block_hashes"] == below["block_hashes"] == found["hashes"]
    assert stored["token_ids"] == TOKENS[:32]
    assert (stored["medium"], below["medium"], removed["medium"]) == ("GPU", "CPU", "GPU")
    assert (stored["parent_block_hash"], stored["block_size"], stored["group_idx"]) == (None, 16, 0)
    assert (stored["lora_name"], stored["lora_id"]) == (name, None if name is None else 2)
    keys = [tuple(each or ()) for each in stored["extra_keys"] or [(), ()]]
    own = () if name is None else (name,)
    assert keys == [(*own, *((salt,) if salt else ())), own]
    assert removed["block_hashes"] == [found["hashes"][1]]
