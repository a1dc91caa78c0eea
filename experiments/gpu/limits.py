"""The machine, and the limits of the GPU, to which the shares of other measurements are relative."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from experiments.calibrate.engine.machine import measure_machine
from experiments.calibrate.engine.timing import Call, Timing, host_s, input_sets, recorded, timed, wall_s
from experiments.gpu.measurement import Measurement, Run, UnavailableError
from kernels.norm import rms_norm

PACKAGES = ("torch", "triton", "numpy", "scipy", "pandas", "pyarrow", "simpy", "hydra-core", "transformers")
TINY = 200  # kernels per timed sequence of small kernels


def table(run: Run) -> list[Measurement]:
    """Returns the table of the machine and its limits, the most important first."""
    return [
        Measurement("rates", _rates),
        Measurement("machine", _machine),
        Measurement("launch", _launches),
        *(Measurement(f"gemm_{name}", partial(_gemm, name)) for name in ("fp8", "int8")),
    ]


def _rates(run: Run, _: None) -> Mapping[str, Any]:
    """Measures copies, reads, products of random numbers (zeros run faster), launches and the bus."""
    found = measure_machine(run.device, torch.bfloat16)
    rates = {"copy": found.copy_bytes_per_s, "read": found.bandwidth_bytes_per_s, **found.flops_per_s}
    return rates | asdict(found) | {"gpu": found.name}


def _machine(run: Run, _: None) -> Mapping[str, Any]:
    """Describes the machine, the versions, and the commit, and which tracked files are changed."""
    found: dict[str, Any] = {"python": platform.python_version(), "processors": os.cpu_count()}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    if run.device.type == "cuda":
        driver = triton.runtime.driver.active.get_current_target()
        found |= {"target": f"{driver.backend} {driver.arch}", "cuda": torch.version.cuda}
        found["free_bytes"] = torch.cuda.mem_get_info()[0]
    git = ["git", "-C", str(Path(__file__).parent)]
    for key, words in {"commit": ["rev-parse", "HEAD"], "changed": ["status", "--porcelain", "-uno"]}.items():
        with suppress(OSError):  # no git
            found[key] = subprocess.run(
                [*git, *words], capture_output=True, text=True, check=False
            ).stdout.strip()
    return found | {"platform": platform.platform()}


def _launches(run: Run, _: None) -> Mapping[str, Any]:
    """Measures seconds per small kernel, from Python and in a CUDA graph, their host time, and `.item()`."""
    x = torch.zeros(1, 1024, device=run.device)

    def kernels() -> None:
        for _ in range(TINY):
            x.add_(1.0)

    found = {
        "eager_s": wall_s(kernels, run.device, 20) / TINY,
        "torch_host_s": host_s(lambda: x.add_(1.0), run.device, TINY),
        "triton_host_s": host_s(lambda: rms_norm(x, x[0], 1e-5), run.device, run.size(TINY, 3)),
        "item_s": wall_s(lambda: x[0, 0].add_(1.0).item(), run.device, TINY),
    }
    if run.device.type == "cuda":
        graph = recorded(kernels)
        found["graph_s"] = wall_s(graph.replay, run.device, 50) / TINY
        found["graph_launch_s"] = host_s(graph.replay, run.device, 20)
    return found


def _gemm(name: str, run: Run, _: None) -> Mapping[str, Any]:
    """Measures the operations/s of a square product in 8 bits."""
    size = run.size(8192, 64)
    if name == "int8":
        x, y = (torch.randint(-128, 128, (size, size), dtype=torch.int8, device=run.device) for _ in range(2))
        call: Call = partial(torch._int_mm, x, y.t())
    else:
        x, y = (torch.randn(size, size, device=run.device).to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), dtype=torch.float32, device=run.device)
        call = partial(torch._scaled_mm, x, y.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    try:
        found = timed([call], run.device, rep_ms=150)
    except NotImplementedError as error:
        raise UnavailableError(str(error)[:200]) from None
    return {"size": size, "ops_per_s": 2 * size**3 / found.median_s, **found.row()}


def linear_timing(m: int, k: int, n: int, device: torch.device) -> Timing:
    """Times torch's bf16 product of x [m, k] and a weight [n, k]."""

    def make(device: torch.device) -> Call:
        x_MK, weight_NK = (torch.randn(rows, k, device=device).bfloat16() for rows in (m, n))
        out_MN = torch.empty(m, n, dtype=torch.bfloat16, device=device)
        return lambda: torch.mm(x_MK, weight_NK.t(), out=out_MN)

    return timed(input_sets(make, device, 2.0 * k * n), device, rep_ms=40)
