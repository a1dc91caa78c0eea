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

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

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
from realengine.ahead.zeros import CPU, MAX_LORAS, MAX_NUM_SEQS, Step, cut, zero_model
from realengine.model.backend import TRITON, check_supported
from realengine.model.lora import AdapterBank, make_segments, num_decode_segments
from realengine.runner.executor import Executor
from realengine.runner.graphs import default_sizes
from realengine.runner.host_kv import HostKv
from realengine.runner.work import SAMPLING, Draw, Padding, Shape, Work, pack, pack_sampling
from realengine.settings import DTYPES, KV_DTYPES

LIMITS = Path(__file__).with_name("limits.json")
INTEGERS = (torch.int32, torch.int64)


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
        yield step(f"graph of {num_rows}", decode_work(num_rows, longest, Draw.greedy, bank))
        yield step(f"graph of {num_rows}, sampled", decode_work(num_rows, longest, Draw.sample, bank))
    for num_rows in (1, 3, 8, 64, 255):  # without a graph, for the step's own context lengths
        for context_len in (100, 1000, longest):
            for draw in Draw:
                name = f"decode of {num_rows}, context {context_len}, {draw.name}"
                yield step(name, decode_work(num_rows, context_len, draw, bank))
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


def decode_work(num_rows: int, context_len: int, draw: Draw, bank: AdapterBank | None) -> Work:
    """Returns a step in which each row decodes one token at one context length; all blocks are block 0."""
    segments = _segments(bank, [1] * num_rows, only_decodes=True)
    shape = Shape(
        num_rows,
        num_rows,
        num_rows,
        num_rows,
        0,
        context_len,
        draw,
        num_segments=len(segments) // 2,
    )
    zeros, places = np.zeros(num_rows), np.full(num_rows, Padding(MAX_NUM_SEQS, 0).place)
    contexts = np.full(num_rows, context_len)
    sections = [_sampling(num_rows), zeros, np.arange(num_rows), contexts, places, zeros, segments]
    return Work(shape=shape, words=pack(sections))


def mixed_work(
    num_decodes: int, chunks: Sequence[int], num_cached: int, bank: AdapterBank | None, *, drawn: bool = True
) -> Work:
    """Returns a step with prompt chunks, each after num_cached tokens; decodes have as long a context."""
    counts = np.array([1] * num_decodes + list(chunks))
    ends = np.cumsum(counts)
    num_tokens, num_rows = int(ends[-1]), len(counts)
    slots = np.arange(num_rows)
    rows_drawn = ends - 1 if drawn else ends[:0]
    segments = _segments(bank, counts.tolist(), only_decodes=False)
    shape = Shape(
        num_tokens,
        num_rows,
        len(rows_drawn),
        num_decodes,
        max(chunks),
        num_cached + max(chunks),
        Draw.sample,
        num_segments=len(segments) // 2,
    )
    sections = [
        _sampling(len(rows_drawn)),
        np.zeros(num_tokens),
        num_cached + np.concatenate([np.arange(count) for count in counts]),
        np.repeat(slots, counts),
        slots,
        num_cached + counts,
        np.concatenate([[0], np.cumsum(chunks)]),
        rows_drawn,
        slots[: len(rows_drawn)],
        segments,
    ]
    return Work(shape=shape, words=pack(sections))


def _sampling(num_rows: int) -> np.ndarray:
    return pack_sampling(np.zeros(num_rows, SAMPLING))


def _segments(bank: AdapterBank | None, num_tokens_B: Sequence[int], *, only_decodes: bool) -> np.ndarray:
    """Returns segments of rows that use all slots of the bank, built as the runner builds them."""
    if bank is None:
        return np.empty(0, np.int32)
    num_rows = len(num_tokens_B)
    slots_B = sorted(row % bank.max_loras for row in range(num_rows))
    most = bank.max_segment_tokens(only_decodes)
    num_segments = num_decode_segments(num_rows, bank.max_loras) if only_decodes else None
    return np.concatenate(make_segments(slots_B, num_tokens_B, most, num_segments))


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


class WithoutProducts(TorchFunctionMode):
    """Skips matrix products of libraries, and makes integer tensors zero.

    Drawn tokens must be zero, because they are indices of the next step.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            x, weight = args[:2]
            return x.new_empty(*x.shape[:-1], len(weight))
        if func is torch.mm:
            return args[0].new_empty(len(args[0]), args[1].shape[1])
        if func is torch.bmm:
            return args[0].new_empty(*args[0].shape[:2], args[1].shape[2])
        if func is torch.empty and kwargs.get("dtype") in INTEGERS:
            func = torch.zeros
        if func is torch.Tensor.new_empty and args[0].dtype in INTEGERS:
            func = torch.Tensor.new_zeros
        return func(*args, **kwargs)
