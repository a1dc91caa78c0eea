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
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from kernels.ahead import DEFAULT_CHIPS, Compiler, Row, argument_parser, freeze, print_row, read_limits
from policies.speculation.engine.drafts import Shapes
from realengine.ahead.setups import DRAFTERS, DRAFTS, MODELS, SETUPS, Setup
from realengine.ahead.startup import zero_executor
from realengine.ahead.zeros import CPU, Step, WithoutProducts, cut
from realengine.model.backend import TRITON, check_supported
from realengine.runner.executor import Executor
from realengine.runner.graphs import default_sizes
from realengine.runner.host_kv import HostKv
from realengine.runner.warm_up import decode_work, drafting_work, mixed_work, pass_work
from realengine.runner.work import Draw, Padding, StepSize, Work
from realengine.speculation.drafter import DrafterContext
from realengine.speculation.drafters.load import load_draft
from realengine.speculation.settings import NEEDS_MODEL, PROPOSERS, SpeculationSettings
from realengine.speculation.verifier import DeviceDrafts

LIMITS = Path(__file__).with_name("limits.json")


def main(argv: list[str] | None = None) -> int:
    """Compiles, prints the rows, and returns the exit status."""
    parser = argument_parser("realengine.ahead", __doc__)
    add = parser.add_argument
    add("--model", action="append", choices=list(MODELS), help="compile only these models; default: all")
    add("--case", default="", help="compile only steps whose setup and name contain this text")
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
    shape, first = setup.shape, len(compiler.rows)
    with compiler.compiling(setup.name, "check"):
        try:
            dtypes = shape.dtype, shape.kv_dtype
            formats: dict[str, Any] = {"quantization": shape.quantization, "world_size": shape.world_size}
            check_supported(shape.architecture, TRITON, *dtypes, **formats)
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
    shape = setup.shape
    bank, longest, most = shape.bank(), shape.max_model_len, shape.max_num_seqs
    executor = zero_executor(shape, bank)

    def step(name: str, work: Work) -> Step:
        return Step(name, lambda: executor.run(work))

    for num_rows in default_sizes(most):  # as captured, for the longest context
        for suffix, draw in (("", Draw.greedy), (", sampled", Draw.sample)):
            yield step(f"graph of {num_rows}{suffix}", decode_work(num_rows, longest, draw, bank, most))
    # Without a graph, for the lengths of its own contexts.
    for num_rows, context_len, draw in product((1, 3, 8, 64, 255), (100, 1000, longest), Draw):
        name = f"decode of {num_rows}, context {context_len}, {draw.name}"
        yield step(name, decode_work(num_rows, context_len, draw, bank, most))
    chunks = [(0, [n]) for n in (1, 16, 100, 512, 2048)] + [(1, [2047]), (3, [5, 33, 200]), (64, [448])]
    for (num_decodes, sizes), num_cached in product([*chunks, (255, [1793])], (0, longest - 2048)):
        name = f"{num_decodes} decodes, chunks {sizes} behind {num_cached}"
        yield step(name, mixed_work(num_decodes, sizes, num_cached, bank))
    yield step("nothing drawn", mixed_work(0, [512], 0, bank, drawn=False))
    pairs = np.array([[1, 0], [2, 1]], np.int32)
    yield step("copy on write", Work(copies=pairs))
    yield step("swap", Work(moves=((True, pairs), (False, pairs))))


def drafting_steps(setup: Setup, drafter: str) -> Iterator[Step]:
    """Yields passes of a setup, with sizes at and around those at which launches differ."""
    settings = _settings(setup, drafter)
    executor, drafts = _executor(setup, settings)
    shapes, longest = Shapes(settings.proposer), setup.shape.max_model_len
    padding = Padding(setup.shape.max_num_seqs, -(-longest // setup.shape.block_size))

    def passed(num_seqs: int, levels: int, context_len: int, draw: Draw) -> Step:
        num_drafts = int(shapes.rows[levels])
        size = StepSize(num_seqs, num_drafts, levels, shapes.max_depth if drafts else None)
        work = pass_work(size, context_len, draw, padding, shapes)
        name = f"pass of {num_seqs} x {1 + num_drafts}, context {context_len}, {draw.name}"
        return Step(name, lambda: executor.run(work))

    for num_seqs, num in product((1, 8, 64), sorted({0, 1, 2, shapes.max_depth})):
        yield passed(num_seqs, num, 100, Draw.greedy)
        yield passed(num_seqs, num, longest, Draw.sample)
    yield passed(8, shapes.max_depth, 1000, Draw.penalised)
    for num_decodes, chunks in ((0, [100]), (3, [5, 33, 200]), (64, [448])):
        work = drafting_work(num_decodes, shapes, chunks, 1000, padding.slot, drafts=drafts)
        name = f"{num_decodes} x {1 + shapes.num_rows}, chunks {chunks}"
        yield Step(name, partial(executor.run, work))


def _settings(setup: Setup, drafter: str) -> SpeculationSettings:
    config = dict(DRAFTERS[drafter])
    if issubclass(PROPOSERS[config["method"]], NEEDS_MODEL):  # type: ignore[arg-type]
        is_model = config["method"] in ("draft_model", "specinfer_tree")
        config["model"] = cut(MODELS[DRAFTS[setup.model] if is_model else setup.model])
    return SpeculationSettings.of(config)


def _executor(setup: Setup, settings: SpeculationSettings) -> tuple[Executor, bool]:
    """Builds the engine's executor and its drafter; returns, too, whether it drafts on the device."""
    shape = setup.shape
    decoder, cache = shape.model()
    context = DrafterContext(
        target=decoder,
        architecture=cut(shape.architecture),
        source=None,
        backend=TRITON,
        dtype=shape.dtype,
        kv_dtype=shape.kv_dtype,
        device=CPU,
        group=decoder.group,
        block_size=shape.block_size,
        max_model_len=shape.max_model_len,
        max_num_seqs=shape.max_num_seqs,
        seed=0,
    )
    with WithoutProducts():
        draft = load_draft(settings, context)
    drafter = None if draft is None else draft.build(cache)
    executor = Executor(
        decoder,
        cache,
        TRITON,
        drafts=DeviceDrafts(settings.proposer, drafter, draft is not None and draft.draws),
        num_slots=shape.max_num_seqs,
        max_model_len=shape.max_model_len,
        host_kv=HostKv(cache, TRITON),
    )
    return executor, draft is not None
