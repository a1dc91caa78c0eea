"""The ahead-of-time compiler, in a process of its own: this one interprets kernels and cannot compile."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kernels import ahead


def run_ahead(*arguments, **environment):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    command = [sys.executable, "-m", "kernels.ahead", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)


def rows_of(done):
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_elementwise_kernels_keep_their_limits(target):
    done = run_ahead("--target", target, "activation", "norm", "--case=-1x")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(done)
    assert {row["kernel"] for row in rows} == {"gated_kernel", "rms_norm_kernel", "qk_norm_kernel"}
    assert all(row["target"] == target and row["registers"] > 0 and row["spills"] == 0 for row in rows)


@pytest.mark.slow
def test_fp8_cache_is_refused_where_the_chip_has_none():
    done = run_ahead("--target", "sm_80", "--target", "sm_90", "rope", "--case", "fp8")
    refused, compiled = rows_of(done)
    assert done.returncode == 0
    assert "needs sm_89" in refused["unsupported"]
    assert compiled["target"] == "sm_90"
    assert compiled["registers"] > 0


BROKEN = """
import json
from dataclasses import asdict

import torch, triton, triton.language as tl
from kernels import ahead
from kernels.launch import launch

@triton.jit
def product(x_ptr, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + at)
    tl.store(x_ptr + at, tl.dot(x, tl.dot(x, x).to(tl.float16)).to(tl.float16))

@triton.jit
def wrong(x_ptr):
    tl.store(x_ptr, no_such_name)

def rows(chip, limits, *launches):
    compiler = ahead.Compiler(chip, limits)
    with compiler.compiling("m", "x"):
        for kernel, meta in launches:
            launch(kernel, (1,), torch.ones(1, dtype=torch.float16), **meta)
    return compiler.rows

few, = rows("sm_80", {"product": {"sm_80": 8}}, (product, {"N": 32}))
small, large = rows("sm_90", {}, (product, {"N": 32}), (product, {"N": 32}), (product, {"N": 64}))
error, after = rows("sm_80", {}, (wrong, {}), (product, {"N": 32}))
print(json.dumps([asdict(row) for row in (few, small, large, error, after)]))
"""


@pytest.mark.slow
def test_what_is_wrong_with_a_kernel_is_named(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([os.getcwd(), env.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    few, small, large, error, after = json.loads(done.stdout)
    assert few["broken"] == f"registers {few['registers']}, limit 8"
    assert small["dot_rows"] == 32
    assert small["tensor_ops"] > 0
    assert small["warpgroup_ops"] == 0
    assert large["dot_rows"] == 64
    assert large["warpgroup_ops"] > 0
    assert small["broken"] == large["broken"] == ""
    assert small["launch"] == "N=32"
    assert "does not compile" in error["broken"]
    assert "no_such_name" in error["broken"]
    assert after["registers"] > 0


@pytest.mark.parametrize(
    ("target", "numbers", "broken"),
    [
        ("sm_80", {"spills": 10, "registers": 40}, []),
        ("sm_80", {"spills": 37, "registers": 40}, ["spills 37, limit 16"]),
        ("sm_80", {"registers": 41}, ["registers 41, limit 40"]),
        ("sm_80", {"shared_bytes": 163 << 10}, []),
        ("sm_80", {"shared_bytes": 200_000}, ["shared memory 200000 bytes, limit 166912"]),
        ("gfx942", {"shared_bytes": 65_537}, ["shared memory 65537 bytes, limit 65536"]),
        ("gfx942", {"dot_rows": 16}, ["a dot of 16 rows without tensor-core instructions"]),
        ("gfx942", {"dot_rows": 64, "tensor_ops": 8}, []),
        ("sm_80", {"dot_rows": 64, "tensor_ops": 8}, []),
        ("sm_90", {"dot_rows": 32, "tensor_ops": 8}, []),
        ("sm_90", {"dot_rows": 64, "tensor_ops": 8}, ["a dot of 64 rows without warpgroup instructions"]),
        ("sm_90", {"dot_rows": 64, "tensor_ops": 8, "warpgroup_ops": 8}, []),
    ],
)
def test_limits(target, numbers, broken):
    row = ahead.Row(module="m", case="x", target=target, **numbers)
    assert list(ahead._broken(row, most_registers=40)) == broken


def test_freezing_takes_the_most_registers_with_slack_and_leaves_other_kernels(tmp_path):
    path = tmp_path / "limits.json"
    path.write_text('{"old": {"sm_80": 9}, "k": {"gfx942": 7, "sm_90": 500}}')
    seen = [
        ahead.Row(module="m", case="x", target="sm_90", kernel="k", registers=registers)
        for registers in (40, 90, 60)
    ]
    ahead.freeze([*seen, ahead.Row(module="m", case="x", target="sm_80", unsupported="no fp8")], path)
    assert ahead.read_limits(path) == {"old": {"sm_80": 9}, "k": {"gfx942": 7, "sm_90": 90 + ahead.SLACK}}
    assert ahead.read_limits(tmp_path / "none.json") == {}


@pytest.mark.slow
def test_unknown_modules_and_the_interpreter_are_refused():
    done = run_ahead("nothing")
    assert done.returncode == 2
    assert "module=nothing: must be a kernel module" in done.stderr
    done = run_ahead("norm", TRITON_INTERPRET="1")
    assert done.returncode == 2
    assert "TRITON_INTERPRET is set" in done.stderr
