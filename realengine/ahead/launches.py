"""Compiles every launch that the engine's steps make, for chips that are not available.

    python -m realengine.ahead [--target sm_90] [--model llama-3.1-8b] [--case decode] [--freeze]

The engine's own executor runs on the CPU with the Triton backend, at the real dimensions of its models:
decode steps at every graph size and with every way to draw, steps with prompt chunks, copies and swaps of
blocks; in each quantization, KV dtype and dtype, with adapters, and as one of two ranks; and passes with
drafts of every drafter. Launches are compiled but not run, matrix products of libraries are skipped, and only
two layers with zero weights are used, because the others make the same launches. Rows, limits and exit
status: see `kernels.ahead`; registers are compared with `realengine/ahead/limits.json`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kernels.ahead import (
    DEFAULT_CHIPS,
    Compiler,
    Row,
    argument_parser,
    freeze,
    print_row,
    read_limits,
)
from realengine.ahead.drafting import drafting_steps
from realengine.ahead.setups import MODELS, SETUPS, Setup
from realengine.ahead.zeros import CPU, MAX_LORAS, MAX_NUM_SEQS, Step, WithoutProducts, cut, zero_model
from realengine.model.backend import TRITON, check_supported
from realengine.model.lora import AdapterBank
from realengine.runner.executor import Executor
from realengine.runner.graphs import default_sizes
from realengine.runner.host_kv import HostKv
from realengine.runner.warm_up import decode_work, mixed_work
from realengine.runner.work import Draw, Work
from realengine.settings import DTYPES, KV_DTYPES

LIMITS = Path(__file__).with_name("limits.json")


def main(argv: list[str] | None = None) -> int:
    """Compiles, prints the rows, and returns the exit status."""
    parser = argument_parser("realengine.ahead", __doc__)
    parser.add_argument(
        "--model", action="append", choices=list(MODELS), help="compile only these models; default: all"
    )
    parser.add_argument(
        "--case", default="", help="compile only steps whose setup and name contain this text"
    )
    asked = parser.parse_args(argv)
    setups = [setup for setup in SETUPS if asked.model is None or setup.model in asked.model]
    limits = {} if asked.freeze else read_limits(LIMITS)
    rows = []
    for chip in asked.target or DEFAULT_CHIPS:
        compiler = Compiler(chip, limits)
        for setup in setups:
            for row in compiled(setup, compiler, asked.case):
                print_row(row)
                rows.append(row)
    if not rows:
        parser.error("no step was compiled")
    if asked.freeze:
        freeze(rows, LIMITS)
    return int(any(row.broken for row in rows))


def compiled(setup: Setup, compiler: Compiler, part_of_name: str = "") -> Iterator[Row]:
    """Compiles a setup's steps; yields rows of new launches, or one row for an unsupported setup."""
    architecture, dtype = MODELS[setup.model], DTYPES[setup.dtype]
    kv_dtype = KV_DTYPES.get(setup.kv_cache_dtype, dtype)
    first = len(compiler.rows)
    with compiler.compiling(setup.name, "check"):
        try:
            check_supported(
                architecture,
                TRITON,
                dtype,
                kv_dtype,
                quantization=setup.quantization,
                world_size=setup.world_size,
            )
        except ValueError as error:
            compiler.refuse(setup.name, "check", str(error))
            yield from compiler.rows[first:]
            return
    for step in steps(setup):
        if part_of_name in f"{setup.name} {step.name}":
            first = len(compiler.rows)
            with compiler.compiling(setup.name, step.name), WithoutProducts():
                step.run()
            yield from compiler.rows[first:]


def steps(setup: Setup) -> Iterator[Step]:
    """Yields the engine's operations in a setup, with sizes at and around those at which launches differ."""
    if setup.drafter is not None:
        yield from drafting_steps(setup, setup.drafter)
        return
    architecture = MODELS[setup.model]
    bank = None
    if setup.max_rank:
        bank = AdapterBank(
            cut(architecture),
            TRITON,
            DTYPES[setup.dtype],
            CPU,
            max_loras=MAX_LORAS,
            max_rank=setup.max_rank,
        )
    executor = _executor(setup, bank)
    longest = architecture.max_position_embeddings

    def step(name: str, work: Work) -> Step:
        return Step(name, lambda: executor.run(work))

    for num_rows in default_sizes(MAX_NUM_SEQS):  # as captured, for the longest context
        yield step(f"graph of {num_rows}", decode_work(num_rows, longest, Draw.greedy, bank, MAX_NUM_SEQS))
        yield step(
            f"graph of {num_rows}, sampled", decode_work(num_rows, longest, Draw.sample, bank, MAX_NUM_SEQS)
        )
    for num_rows in (1, 3, 8, 64, 255):  # without a graph, for the step's own context lengths
        for context_len in (100, 1000, longest):
            for draw in Draw:
                name = f"decode of {num_rows}, context {context_len}, {draw.name}"
                yield step(name, decode_work(num_rows, context_len, draw, bank, MAX_NUM_SEQS))
    for num_decodes, chunks in (
        (0, [1]),
        (0, [16]),
        (0, [100]),
        (0, [512]),
        (0, [2048]),
        (1, [2047]),
        (3, [5, 33, 200]),
        (64, [448]),
        (255, [1793]),
    ):
        for num_cached in (0, longest - 2048):
            name = f"{num_decodes} decodes, chunks {chunks} behind {num_cached}"
            yield step(name, mixed_work(num_decodes, chunks, num_cached, bank))
    yield step("nothing drawn", mixed_work(0, [512], 0, bank, drawn=False))
    pairs = np.array([[1, 0], [2, 1]], np.int32)
    yield step("copy on write", Work(copies=pairs))
    yield step("swap", Work(moves=((True, pairs), (False, pairs))))


def _executor(setup: Setup, bank: AdapterBank | None) -> Executor:
    """Builds the engine's executor with two layers, but the KV cache of all layers for block copies."""
    decoder, cache = zero_model(setup, bank)
    return Executor(
        decoder,
        cache,
        TRITON,
        num_slots=MAX_NUM_SEQS,
        max_model_len=MODELS[setup.model].max_position_embeddings,
        host_kv=HostKv(cache, TRITON),
        adapters=bank,
    )
