"""Compiles all kernel cases for the GPU at hand, one process per module: registers, spills, shared memory.

The compiled kernels remain in Triton's cache, so the parts that time kernels do not wait for compilation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean
from typing import Any

import torch

from experiments.gpu.record import Record, UnavailableError
from kernels.ahead import CHIPS, kernel_modules
from kernels.launch import target
from realengine.ahead.setups import MODELS
from realengine.ahead.startup import MOST_THREADS, EngineShape, launches_of_start

LLAMA_8B = EngineShape(
    architecture=MODELS["llama-3.1-8b"],
    dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
    quantization=None,
    world_size=1,
    block_size=16,
    max_model_len=32768,
    max_num_seqs=256,
    max_num_tokens=8192,
)
DRY_RUN = ("activation", "--case=-1x1536")


def run(record: Record) -> None:
    """Adds one row per compiled kernel; `ok`: it compiles, fits, and does not spill where it must not."""
    chip = target() if record.device.type == "cuda" else "sm_90"
    if chip not in CHIPS:
        record.measure("chip", lambda: _refuse(chip))
        return
    commands = [DRY_RUN] if record.quick else [(module,) for module in kernel_modules()]
    found: list[dict[str, Any]] = []
    lock = threading.Lock()

    def compile_one(words: Sequence[str]) -> None:
        rows = _compiled(words, chip, record.left_s - 2)
        with lock:
            found.extend(rows)
            for row in rows:
                record.add(row)

    begin = time.perf_counter()
    with ThreadPoolExecutor(max_workers=max(1, (os.cpu_count() or 2) - 1)) as pool:
        list(pool.map(compile_one, commands))
    spilling = [row["name"] for row in found if row.get("spills")]
    summary = f"{len(found)} kernels in {time.perf_counter() - begin:.0f} s, {len(spilling)} spill"
    record.measure("all", lambda: {"spilling": spilling, "said": summary}, least_s=0.0)
    record.measure("first_start", lambda: _first_start(found, chip), least_s=0.0)


def _first_start(found: Sequence[dict[str, Any]], chip: str) -> dict[str, Any]:
    """Estimates the compilation at the first start of Llama-3.1-8B from the times of the same kernels."""
    seconds: dict[str, list[float]] = {}
    for row in found:
        if row.get("compile_s"):
            seconds.setdefault(row["kernel"], []).append(row["compile_s"])
    usual_s = fmean(time_s for times in seconds.values() for time_s in times) if seconds else 0.0
    launched = launches_of_start(LLAMA_8B, chip)
    total_s = sum(fmean(seconds.get(kernel, [usual_s])) for kernel in launched)
    threads = min(MOST_THREADS, os.cpu_count() or 1)
    said = (
        f"{len(launched)} kernels, {total_s:.0f} s one by one, {total_s / threads:.0f} s in {threads} threads"
    )
    return {"num_kernels": len(launched), "one_by_one_s": total_s, "threads": threads, "said": said}


def _compiled(words: Sequence[str], chip: str, left_s: float) -> list[dict[str, Any]]:
    """Returns the rows that `python -m kernels.ahead` prints for one module."""
    command = [sys.executable, "-m", "kernels.ahead", "--target", chip, *words]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=max(left_s, 1.0), check=False
        )
        output = done.stdout
        has_ended_well = (
            done.returncode in (0, 1) and "{" in output
        )  # 1: a kernel breaks a limit, see its row
        failure = "" if has_ended_well else f"ended with {done.returncode}: {done.stderr[-1500:]}"
    except subprocess.TimeoutExpired as error:
        partial_output = error.stdout or ""
        output = (
            partial_output.decode(errors="replace") if isinstance(partial_output, bytes) else partial_output
        )
        failure = "out of time: not all kernels were compiled"
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{") and line.endswith("}")]
    named = [
        {
            "name": f"{row['module']}/{row['case']}/{row.get('kernel', '')}",
            "ok": "broken" not in row,
            "why": row.get("broken", ""),
            **row,
        }
        for row in rows
    ]
    return named + ([{"name": words[0], "error": failure}] if failure else [])


def _refuse(chip: str) -> dict[str, Any]:
    raise UnavailableError(f"{chip} is not a target of kernels.ahead, which compiles for {', '.join(CHIPS)}")
