"""Compiles the kernels of an engine in several threads before it starts.

A model of zero weights with two layers runs steps of every kind, of which each launch is compiled instead of
run. Triton keeps what it has compiled on disk, so that later starts only read it. What is not found here is
compiled at its first launch.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import triton

from kernels.launch import Grid, compiling_for, target
from realengine.ahead.zeros import EngineShape, WithoutProducts
from realengine.model.lora import AdapterBank
from realengine.progress import QUIET, Progress
from realengine.runner.executor import Executor
from realengine.runner.graphs import default_sizes
from realengine.runner.host_kv import HostKv
from realengine.runner.warm_up import decode_work, mixed_work
from realengine.runner.work import Draw, Work

ROW_STEP = 128
"""Numbers of tokens whose launches are compiled: GEMMs choose their tiles by multiples of it."""
MOST_ROWS = 4096
"""Steps of more tokens launch what those of so many do."""
MOST_THREADS = 16


def compile_kernels(shape: EngineShape, progress: Progress = QUIET, chip: str | None = None) -> int:
    """Compiles all kernels of steps in parallel; returns their number. chip: None: the present one.

    A failure is a warning: what was not compiled is compiled at its first launch, which raises the error.
    """
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
        mode = triton.AsyncCompileMode(pool, ignore_errors=True)

        def enqueue(kernel: Any, grid: Grid, args: tuple[Any, ...], meta: dict[str, Any]) -> None:
            kernel.warmup(*args, grid=grid, **meta)

        with mode:
            try:
                with compiling_for(chip or target(), enqueue):
                    run_works(shape)
            except Exception as error:
                warnings.warn(f"not all kernels were compiled ahead: {error}", stacklevel=2)
            for future in progress.over(mode.raw_futures, "Compiling kernels"):
                wait([future])
    return len(mode.raw_futures)


def run_works(shape: EngineShape) -> None:
    """Runs steps of every kind on zero weights, while launches are compiled or recorded instead of run."""
    with WithoutProducts():
        bank = shape.bank()
        executor = zero_executor(shape, bank)
        executor.warm_up()
        for work in _works(shape, bank):
            executor.run(work)


def zero_executor(shape: EngineShape, bank: AdapterBank | None) -> Executor:
    """Returns the engine's executor of a model of zero weights."""
    decoder, cache = shape.model(bank)
    return Executor(
        decoder,
        cache,
        shape.backend,
        num_slots=shape.max_num_seqs,
        max_model_len=shape.max_model_len,
        host_kv=HostKv(cache, shape.backend),
        adapters=bank,
    )


def _works(shape: EngineShape, bank: AdapterBank | None) -> Iterator[Work]:
    """Yields decode steps of every captured size and beyond, and prompt chunks of every number of tokens."""
    banks = [None] if bank is None else [None, bank]
    sizes = {*default_sizes(shape.max_num_seqs), shape.max_num_seqs}
    for used in banks:
        for num_rows in sorted(sizes):
            for draw in Draw:
                yield decode_work(num_rows, shape.max_model_len, draw, used, shape.max_num_seqs)
        most = min(shape.max_num_tokens, shape.max_model_len)
        for num_tokens in sorted({*range(ROW_STEP, min(most, MOST_ROWS) + 1, ROW_STEP), most}):
            yield mixed_work(0, [num_tokens], 0, used)
