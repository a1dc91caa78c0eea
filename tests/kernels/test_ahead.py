"""The ahead-of-time compiler, in a process of its own: this one interprets kernels and cannot compile."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def run_ahead(*arguments, **environment):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    command = [sys.executable, "-m", "kernels.ahead", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)


def rows_of(done):
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_elementwise_kernels_keep_their_limits(target):
    done = run_ahead("--target", target, "activation", "norm", "--case=-1x")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(done)
    assert {row["kernel"] for row in rows} == {"gated_kernel", "rms_norm_kernel", "qk_norm_kernel"}
    assert all(row["target"] == target and row["registers"] > 0 and row["spills"] == 0 for row in rows)


def test_fp8_cache_is_refused_where_the_chip_has_none():
    done = run_ahead("--target", "sm_80", "--target", "sm_90", "rope", "--case", "fp8")
    refused, compiled = rows_of(done)
    assert done.returncode == 0
    assert "needs sm_89" in refused["unsupported"]
    assert compiled["target"] == "sm_90"
    assert compiled["registers"] > 0


BROKEN = """
import sys
import torch, triton, triton.language as tl
from kernels import ahead
from kernels.case import Case
from kernels.launch import launch

@triton.jit
def product(x_ptr, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + at)
    tl.store(x_ptr + at, tl.dot(x, tl.dot(x, x).to(tl.float16)).to(tl.float16))

@triton.jit
def wrong(x_ptr):
    tl.store(x_ptr, no_such_name)

def case(kernel, **meta):
    return Case("x", lambda device: lambda: launch(kernel, (1,), torch.ones(1, dtype=torch.float16), **meta))

def rows(*case_and_limits):
    import triton.runtime
    triton.runtime.driver.set_active(ahead.NamedDriver("sm_80"))
    return ahead._case_rows("m", case_and_limits[0], "sm_80", case_and_limits[1])

none = {"registers": 0, "spills": 0, "tensor_ops": 0, "warpgroup_ops": 0}
small, = rows(case(product, N=32), {"product": {"sm_80": {"registers": 8}}})
cores, = rows(case(product, N=32), {"product": {"sm_80": {"warpgroup_ops": 1}}})
error, = rows(case(wrong), {})
big = ahead._broken(none | {"spills": 3}, 200_000, "sm_80", {})
print(big, small.broken, cores.broken, error.broken, small.tensor_ops, sep="\\n###\\n")
"""


def test_broken_limits_are_named(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([os.getcwd(), env.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    big, small, cores, error, tensor_ops = done.stdout.split("\n###\n")
    assert big == "spills 3, limit 0; shared memory 200000 bytes, the chip has 166912"
    assert "registers" in small
    assert "limit 8" in small
    assert "warpgroup_ops 0, at least 1" in cores
    assert "does not compile" in error
    assert "no_such_name" in error
    assert int(tensor_ops) > 0


def test_unknown_modules_and_the_interpreter_are_refused():
    done = run_ahead("nothing")
    assert done.returncode == 2
    assert "no kernel module 'nothing'" in done.stderr
    done = run_ahead("norm", TRITON_INTERPRET="1")
    assert done.returncode == 2
    assert "TRITON_INTERPRET is set" in done.stderr
