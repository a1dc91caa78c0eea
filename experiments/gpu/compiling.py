"""Compiles the kernels of a run's steps in the background, in processes on the other CPU cores.

`python -m experiments.gpu.compiling STEP ...` is started with the first step. What it compiles stays in
Triton's cache on disk, where the steps find it: kernels of the engines, of the checks at real sizes, and of
the timed cases. No GPU is used: a driver that only has the chip's name stands for the real one (see
`kernels.ahead`).
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.gpu.engine_correct import COMMON, HALF
from experiments.gpu.engine_models import KINDS, LLAMA_8B, QWEN3_0_6B, TINY, model_of
from experiments.gpu.kernels_correct import checks
from experiments.gpu.kernels_speed import cases
from experiments.gpu.measurement import Run, append
from kernels.ahead import CHIPS, named_driver
from kernels.launch import compiling_for
from realengine.ahead.startup import compile_kernels
from realengine.ahead.zeros import EngineShape
from realengine.model.architecture import Architecture

FREE_CORES = 3
"""Cores that are left to the steps."""


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles in parallel; writes a line per job into compiling.jsonl."""
    parser = argparse.ArgumentParser(prog="python -m experiments.gpu.compiling")
    parser.add_argument("steps", nargs="+")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    asked = parser.parse_args(argv)
    chip, file = "sm_90" if asked.rehearse else _chip(), asked.folder / "compiling.jsonl"
    file.unlink(missing_ok=True)
    begin, workers = time.monotonic(), max(1, (os.cpu_count() or 2) - FREE_CORES)
    names = list(jobs(asked.steps, rehearse=asked.rehearse)) if chip in CHIPS else []
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(compiled, name, chip, rehearse=asked.rehearse): name for name in names}
        for future in as_completed(futures):
            row: dict[str, Any] = {"name": futures[future]}
            try:
                row |= {"num_kernels": future.result()}
            except Exception as error:  # whatever it is, the step compiles the kernel itself, and says so
                row |= {"error": f"{type(error).__name__}: {error}"}
            append(file, row | {"at_s": round(time.monotonic() - begin, 1)})
    return 0


def _chip() -> str:
    """Returns the first GPU's chip, such as sm_90, without using the GPU; empty if nvidia-smi is missing."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    with suppress(OSError):
        done = subprocess.run(query, capture_output=True, text=True, check=False)
        return f"sm_{done.stdout.split(chr(10))[0].strip().replace('.', '')}"
    return ""


def jobs(steps: Sequence[str], *, rehearse: bool) -> dict[str, Callable[[str], int]]:
    """Returns what is compiled for the steps, in their order: functions of the chip, by name."""
    found: dict[str, Callable[[str], int]] = {}
    run = Run(Path(), "cpu", rehearse=rehearse, seed=0, left_s=0.0)
    for step in steps:
        for name, (spec, own) in _engines(step, run).items():
            found[f"{step}/{name}"] = partial(_engine, shape_of(spec, **own))
        if step == "kernels_correct":
            named = checks(run.device, quick=rehearse, compiling=True)
            found |= {f"{step}/{name}": partial(_launches, check) for name, check in named}
        if step in ("kernels_speed", "peers"):
            for case in cases():
                if step == "kernels_speed" or "attention/llama_8b-bf" in case.name:
                    found[f"{step}/{case.name}"] = partial(_launches, partial(_called, case.make))
    return dict(list(found.items())[:2]) if rehearse else found


def compiled(name: str, chip: str, *, rehearse: bool) -> int:
    """Compiles one job in this process; returns the number of its launches or kernels."""
    torch.set_num_threads(1)
    step = name.partition("/")[0]
    return jobs([step], rehearse=rehearse)[name](chip)


def _engines(step: str, run: Run) -> dict[str, tuple[Architecture, dict[str, Any]]]:
    """Returns the engines of a step: their models and settings."""
    if run.rehearse:
        return {"tiny": (TINY, {"max_model_len": 128, "max_num_seqs": 4, "max_num_tokens": 64})}
    if step == "engine_correct":
        own = {kind: {"dtype": "bfloat16"} if kind in HALF else {} for kind in KINDS}
        return {
            kind: (model_of(kind, run), {**COMMON, "max_num_tokens": 2048, **own[kind]}) for kind in KINDS
        }
    llama = LLAMA_8B, {"max_model_len": 33792, "max_num_seqs": 256}
    qwen = {
        step: (QWEN3_0_6B, {"max_model_len": 2048, "max_num_seqs": n})
        for step, n in (("smoke", 16), ("peers", 64))
    }
    return {step: llama} if step == "llama_8b" else {step: qwen[step]} if step in qwen else {}


def shape_of(spec: Architecture, **own: Any) -> EngineShape:
    """Returns the shape of an engine with these settings, as its start has it."""
    dtype = getattr(torch, own.get("dtype", "bfloat16"))
    return EngineShape(
        architecture=spec,
        dtype=dtype,
        kv_dtype=dtype,
        quantization=None,
        world_size=1,
        block_size=16,
        max_model_len=own["max_model_len"],
        max_num_seqs=own["max_num_seqs"],
        max_num_tokens=own.get("max_num_tokens", 8192),
    )


def _engine(shape: EngineShape, chip: str) -> int:
    with named_driver(chip):
        return compile_kernels(shape, chip=chip)


def _launches(call: Callable[[], object], chip: str) -> int:
    """Compiles every launch of a call on tensors of the CPU; returns their number."""
    count = 0

    def compile_one(kernel: Any, grid: Any, args: tuple[Any, ...], meta: dict[str, Any]) -> None:
        nonlocal count
        kernel.warmup(*args, grid=grid, **meta)
        count += 1

    with named_driver(chip), compiling_for(chip, compile_one):
        call()
    return count


def _called(make: Callable[[torch.device], Callable[[], object]]) -> object:
    return make(torch.device("cpu"))()


if __name__ == "__main__":
    # As a module of that name, so that other processes find the functions.
    sys.exit(importlib.import_module("experiments.gpu.compiling").main())
