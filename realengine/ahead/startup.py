"""Compiles the kernels of an engine in several threads before it starts.

A model of zero weights with two layers runs steps of every kind, of which each launch is compiled instead of
run. Triton keeps what it has compiled on disk, so that later starts only read it. What is not found here is
compiled at its first launch.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import torch
import triton

from kernels.launch import Grid, compiling_for, target
from realengine.ahead.zeros import CPU, FirstOf, WithoutProducts, cut, zero_weights
from realengine.model.architecture import Architecture
from realengine.model.backend import TRITON, Backend
from realengine.model.decoders import decoder_of
from realengine.model.kv_cache import KvCache
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


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineShape:
    """The sizes and formats on which the launches of one rank depend. max_num_tokens: of the largest step."""

    architecture: Architecture
    dtype: torch.dtype
    kv_dtype: torch.dtype
    quantization: str | None
    world_size: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_tokens: int
    max_loras: int = 0
    max_rank: int = 0
    backend: Backend = TRITON


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
            for _ in progress.over(_Completed(mode.raw_futures), "Compiling kernels"):
                pass
    return len(mode.raw_futures)


def run_works(shape: EngineShape) -> None:
    """Runs steps of every kind on zero weights, while launches are compiled or recorded instead of run."""
    with WithoutProducts():
        bank = None
        if shape.max_loras:
            bank = AdapterBank(
                cut(shape.architecture),
                shape.backend,
                shape.dtype,
                CPU,
                max_loras=shape.max_loras,
                max_rank=shape.max_rank,
            )
        executor = _executor(shape, bank)
        executor.warm_up()
        for work in _works(shape, bank):
            executor.run(work)


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


def _executor(shape: EngineShape, bank: AdapterBank | None) -> Executor:
    architecture = cut(shape.architecture)
    quantization = "w4a16" if architecture.packed is not None else shape.quantization
    weights = zero_weights(architecture, shape.dtype, quantization, shape.world_size)
    group = FirstOf(0, shape.world_size)
    decoder = decoder_of(architecture, weights, shape.backend, shape.max_model_len, group, bank)
    # Copies of blocks have the tensors of all layers.
    cache = KvCache(shape.architecture, 4, shape.block_size, shape.kv_dtype, CPU, shape.world_size)
    return Executor(
        decoder,
        cache,
        shape.backend,
        num_slots=shape.max_num_seqs,
        max_model_len=shape.max_model_len,
        host_kv=HostKv(cache, shape.backend),
        adapters=bank,
    )


class _Completed:
    """The futures in the order in which they are done."""

    def __init__(self, futures: list[Any]) -> None:
        self._futures = futures

    def __len__(self) -> int:
        return len(self._futures)

    def __iter__(self) -> Iterator[Any]:
        return as_completed(self._futures)
