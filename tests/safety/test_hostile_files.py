"""Files made to hang, exhaust or leave the process are refused in one sentence, at once, in little memory."""

import gzip
import json
import os
import resource
import subprocess
import sys

import pytest
import zstandard

from experiments.place.measured import measured_rates
from sim.settings.errors import ConfigError

GIB = 1 << 30
DEEP = 100_000
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}


def ranked(rate):
    """Returns the summary.json of a capacity search whose only candidate has this rate."""
    return (
        '{"ranked": [{"gpus_per_replica": 1, "tensor_parallel_size": 1, "model": "a", "weights": null, '
        f'"gpu": "b", "kept_output_tokens_per_s_and_replica": {rate}}}]}}'
    )


def simulate(folder, *words):
    """Returns (exit code, text of the error stream, CPU seconds) of `windtunnel simulate`."""
    with (folder / "errors.txt").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "experiments.app.cli", "simulate", "output.report=false", *words],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (4 * GIB, 4 * GIB)),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        _, status, used = os.wait4(process.pid, 0)  # of this process alone
    process.returncode = os.waitstatus_to_exitcode(status)
    # The kernel counts the memory of this process, from which the other one was forked, as its own.
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert used.ru_maxrss < max(GIB / 1024, 1.1 * own)
    return process.returncode, (folder / "errors.txt").read_text(), used.ru_utime + used.ru_stime


def gz_bomb(folder):
    """Writes a line of 64 MiB in 64 KiB: the reader must not need all of it."""
    (folder / "t.csv.gz").write_bytes(gzip.compress(b"x" * (64 << 20), 9))
    return "workload=plain_csv", "t.csv.gz", "a line must have less than 4,194,304 characters"


def zst_bomb(folder):
    (folder / "t.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(b" " * (64 << 20)))
    return "workload=mooncake_jsonl", "t.jsonl.zst", "a line must have less than 4,194,304 characters"


def deep_trace(folder):
    (folder / "t.jsonl").write_text('{"timestamp": ' + "[" * DEEP + "]" * DEEP + "}\n")
    return "workload=mooncake_jsonl", "t.jsonl", "nests values too deeply to be read"


def pipe_trace(folder):
    os.mkfifo(folder / "t.csv")
    return "workload=plain_csv", "t.csv", "must be a regular file, not a pipe, socket or device"


def device_trace(folder):
    (folder / "t.json").symlink_to("/dev/zero")
    return "workload=otel_trace", "t.json", "must be a regular file, not a pipe, socket or device"


def deep_set(folder):
    (folder / "t.json").write_text('[{"conversations": ' + "[" * DEEP)
    return "workload=sharegpt_json", "t.json", "nests values too deeply to be read"


@pytest.mark.parametrize("make", [gz_bomb, zst_bomb, deep_trace, pipe_trace, device_trace, deep_set])
def test_hostile_traces(make, tmp_path):
    workload, name, message = make(tmp_path)
    code, error, seconds = simulate(tmp_path, workload, f"workload.path={name}")
    assert (code, error.count("\n")) == (2, 1)
    assert name in error
    assert message in error
    assert seconds < 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers=1000000000: must be a whole number from 1 to 10,000",
        ),
        (
            {"max_position_embeddings": 10**15},
            "max_position_embeddings=1000000000000000: must be a whole number from 1 to 2,147,483,647",
        ),
        (
            {"hidden_size": 10**30},
            "hidden_size=1" + "0" * 30 + ": must be a whole number from 1 to 2,147,483,647",
        ),
        ({"rope_scaling": "[" * DEEP + "]" * DEEP}, "nests values too deeply to be read"),
    ],
)
def test_hostile_model_configs(changes, message, tmp_path):
    nested = {name: value for name, value in changes.items() if isinstance(value, str)}
    text = json.dumps({**CONFIG, **changes})
    for value in nested.values():
        text = text.replace(json.dumps(value), value)
    (tmp_path / "config.json").write_text(text)
    code, error, seconds = simulate(tmp_path, "model=hf", "model.path=config.json")
    assert (code, error.count("\n")) == (2, 1)
    assert message in error
    assert seconds < 10


def test_a_config_that_stands_for_billions_of_values(tmp_path):
    (tmp_path / "mine/batching").mkdir(parents=True)
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)]
    (tmp_path / "mine/batching/laughs.yaml").write_text("\n".join(lines))
    code, error, seconds = simulate(tmp_path, "--config-dir", "mine", "batching=laughs")
    assert (code, error.count("\n")) == (2, 1)
    assert "laughs.yaml: must have at most 100,000 values" in error
    assert seconds < 10


def test_a_model_config_that_never_ends_is_refused(tmp_path):
    code, error, seconds = simulate(tmp_path, "model=hf", "model.path=/dev/zero")
    rule = "must be a regular file, not a pipe, socket or device"
    assert (code, error) == (2, f"windtunnel: model: /dev/zero: {rule}\n")
    assert seconds < 10


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * DEEP + "]" * DEEP, "nests values too deeply to be read"),
        (ranked(-5), "is not a summary.json of capacity"),
        (ranked("NaN"), "is not a summary.json of capacity"),
    ],
)
def test_measured_rates_that_are_none(text, message, tmp_path):
    file = tmp_path / "summary.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"^measured.0.=.*{message}; give a file such as"):
        measured_rates([str(file)])
