"""Searches launch tables: times cases with the present tile and its neighbours that spill no registers.

A neighbour has up to two fields twice or half as large, or one more or one fewer stage. Other processes
compile them while this one times them. Nothing is changed: tables are edited by hand from the results.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import combinations, product
from typing import Any

import torch

from experiments.calibrate.engine.timing import Call, input_sets, timed
from experiments.gpu.measurement import Measurement, Run, UnavailableError
from kernels import ahead
from kernels.case import Case
from kernels.launch import nearest, target

Change = dict[str, int]  # 1: twice as large, or one more stage; -1: half as large, or one fewer
Tried = list[tuple[Change, "Future[dict[str, Any]]"]]
NOT_COMPILED = ("resident",)
"""Fields that do not change the compiled kernel, only how it is launched."""
IN_PLACE = ("norm", "rope", "block_copy")
"""Modules whose calls change their inputs, so that the results of different tiles cannot be compared."""
SEARCHES = (
    "decode_attention/llama_8b-bfloat16-batch16-context4096",
    "prefill_attention/llama_8b-bfloat16-batch1-8192of8192",
    "w4a16/8b_gate_up_m1_bfloat16",
    "decode_attention/llama_8b-bfloat16-batch1-context32768",
    "decode_attention/llama_8b-bfloat16-batch64-context1024",
    "prefill_attention/llama_8b-bfloat16-batch4-512of4096",
    *("w4a16/8b_qkv_m16_bfloat16", "w4a16/8b_gate_up_m64_bfloat16"),
    *("norm/add_rms_norm-4096x4096", "norm/qk_norm-2048x32+8", "rope/rope-2048x32+8x128"),
    *("activation/silu_mul-2048x14336", "w8a16/8b_gate_up_m1_bfloat16", "w8a8/8b_gate_up_fp8_m1"),
    *("w8a8/8b_gate_up_fp8_m512", "w8a16/8b_gate_up_m512_bfloat16", "moe/qwen3_t32", "moe/qwen3_t4096"),
    "mla_decode/deepseek_v3-heads128-batch32-context4096",
    "mla_decode/deepseek_v3-heads16-batch64-context4096",
    "sampling/sample_penalties_top_k_top_p-64x128256",
    *("lora/shrink_qkv_r16_t64", "block_copy/copy_blocks-64x32x16x8x128"),
)
"""Cases of kernel modules, the most valuable first."""
REHEARSED = ("activation/silu_mul-1x1536",)


def tiles_in(entry: Any) -> Iterator[Any]:
    """Yields the tiles of a launch table, or of an entry of it."""
    if hasattr(entry, "_fields"):
        yield entry
    else:
        for inner in entry.values() if isinstance(entry, dict) else entry:
            yield from tiles_in(inner)


def changes(module: str) -> list[Change]:
    """Returns the changes of up to two fields of the module's tiles."""
    fields = next(tiles_in(importlib.import_module(f"kernels.{module}").TILES))._fields
    sets = [names for count in (1, 2) for names in combinations(fields, count)]
    return [
        dict(zip(names, ways, strict=True)) for names in sets for ways in product((1, -1), repeat=len(names))
    ]


def case_of(name: str) -> Case:
    """Returns the case MODULE/CASE. Raises ValueError if the module has no case of that name."""
    module, _, wanted = name.partition("/")
    cases = importlib.import_module(f"kernels.{module}").cases()
    found: list[Case] = [case for case in cases if case.name == wanted]
    if not found:
        raise ValueError(f"{name}: the module has no such case")
    return found[0]


def table(run: Run) -> list[Measurement]:
    """Returns a row per search: the present tile, its neighbours by time, and the gain of the fastest."""
    names = run.size(SEARCHES, REHEARSED)
    return [Measurement(name, partial(_search, name), _compilers, limit_s=60.0) for name in names]


@contextmanager
def _compilers(run: Run) -> Iterator[Mapping[str, Tried]]:
    """Yields the neighbours in every search with what their compilation will say, in other processes."""
    chip = target() if run.device.type == "cuda" else "sm_90"
    if chip not in ahead.CHIPS:
        raise UnavailableError(f"{chip} is not a target of kernels.ahead: {', '.join(ahead.CHIPS)}")
    wanted = {name: changes(name.partition("/")[0]) for name in run.size(SEARCHES, REHEARSED)}
    before = os.environ.get("TRITON_INTERPRET", "0")
    os.environ["TRITON_INTERPRET"] = "0"  # the processes compile, even if this one interprets
    workers = run.size(max(1, (os.cpu_count() or 2) - 1), 1)
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    try:
        tried = {name: _submit(pool, name, each, chip) for name, each in wanted.items()}
        os.environ["TRITON_INTERPRET"] = before
        yield tried
    finally:
        os.environ["TRITON_INTERPRET"] = before
        pool.shutdown(wait=False, cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, name: str, wanted: list[Change], chip: str) -> Tried:
    """Submits the compilation of each neighbour; those that share a kernel are compiled once."""
    by_kernel: dict[str, Future[dict[str, Any]]] = {}
    found: Tried = []
    for change in wanted:
        key = str({field: way for field, way in change.items() if field not in NOT_COMPILED})
        if key not in by_kernel:
            by_kernel[key] = pool.submit(compiled, name, change, chip)
        found.append((change, by_kernel[key]))
    return found


def _search(name: str, run: Run, tried: Mapping[str, Tried]) -> Mapping[str, Any]:
    module, case = name.partition("/")[0], case_of(name)
    calls = input_sets(case.make, run.device, case.bytes_moved)
    before = timed(calls, run.device, rep_ms=40)
    expected = None if module in IN_PLACE else calls[0]()
    rows = []
    for change, future in tried[name]:
        if run.left_s < 5.0:
            break
        rows.append({"change": change, **_neighbour(module, run, calls, change, future, expected)})
    again = timed(calls, run.device, rep_ms=40)  # measured again: the noise of a difference
    now_s = min(before.median_s, again.median_s)
    usable = [row for row in rows if "median_s" in row and row["ok"]]
    best = min(usable, key=lambda row: row["median_s"], default=None)
    tiles = importlib.import_module(f"kernels.{module}").TILES
    return {
        "present": str(tiles[nearest(target(), tiles)]),
        "present_s": now_s,
        "noise": abs(before.median_s - again.median_s) / now_s,
        "best": best,
        "gain": now_s / best["median_s"] if best is not None else 1.0,
        "num_not_tried": len(tried[name]) - len(rows),
        "tried": sorted(rows, key=lambda row: row.get("median_s", float("inf"))),
    }


def _neighbour(
    module: str, run: Run, calls: list[Call], change: Change, future: Future[dict[str, Any]], expected: object
) -> dict[str, Any]:
    """Returns the compiler's figures, and the time of the neighbour if it fits and does not spill."""
    try:
        use = future.result(timeout=max(run.left_s - 3.0, 0.1))
    except TimeoutError:
        return {"skipped": "not compiled in time"}
    if use["unusable"]:
        return use
    with changed(module, change):
        try:
            right = _agrees(calls[0](), expected)
            return use | {"ok": right} | timed(calls, run.device, rep_ms=20).row()
        except (ValueError, RuntimeError) as error:
            if run.device.type == "cuda":
                torch.cuda.synchronize()  # raises if the GPU has become unusable
            return use | {"raised": f"{type(error).__name__}: {str(error)[:200]}"}


def _agrees(found: object, expected: object) -> bool:
    if not isinstance(found, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return True
    if not found.is_floating_point():
        return bool((found == expected).float().mean() >= 0.98)
    wide = expected.double().nan_to_num()
    return bool((found.double().nan_to_num() - wide).norm() <= 0.01 * wide.norm())


@contextmanager
def changed(module: str, change: Change) -> Iterator[None]:
    """Changes the fields of every tile of the module's launch table, inside the context."""
    tiles: dict[str, Any] = importlib.import_module(f"kernels.{module}").TILES
    before = dict(tiles)
    tiles.update({chip: _changed(entry, change) for chip, entry in before.items()})
    try:
        yield
    finally:
        tiles.update(before)


def _changed(entry: Any, change: Change) -> Any:
    if isinstance(entry, dict):
        return {key: _changed(inner, change) for key, inner in entry.items()}
    if not hasattr(entry, "_fields"):
        return tuple(_changed(inner, change) for inner in entry)
    own = entry._asdict()
    sizes = {
        f: own[f] + way if f == "num_stages" else max(1, int(own[f] * 2**way)) for f, way in change.items()
    }
    return entry._replace(**sizes)


def compiled(name: str, change: Change, chip: str) -> dict[str, Any]:
    """Compiles the case's kernels with a change; returns registers, spills and shared memory.

    `unusable` says why it should not be timed. Run it where kernels are not interpreted: the result remains
    in Triton's cache for later processes.
    """
    torch.set_num_threads(1)
    module, compiler = name.partition("/")[0], ahead.Compiler(chip, {})
    with changed(module, change), compiler.compiling(module, name):
        try:
            case_of(name).make(torch.device("cpu"))()
        except ValueError as error:
            compiler.refuse(module, name, str(error))
    rows = compiler.rows
    use: dict[str, Any] = {
        key: max((getattr(row, key) for row in rows), default=0)
        for key in ("registers", "spills", "shared_bytes")
    }
    return use | {"unusable": "; ".join(filter(None, map(_unusable, rows)))[-200:]}


def _unusable(row: ahead.Row) -> str:
    """Returns why a kernel is not worth timing on the device; empty if it is."""
    if row.unsupported or row.broken.startswith("does not compile"):
        return str(row.unsupported or row.broken)
    if row.shared_bytes > ahead.CHIPS[row.target].shared_bytes:
        return f"shared memory {row.shared_bytes} bytes"
    return f"spills {row.spills}" if row.spills else ""
