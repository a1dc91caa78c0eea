"""Searches launch tables: times each case with the present tile and with others that do not spill registers.

Other processes compile the candidates while this one times them. Nothing is changed: tables are edited by
hand from the results.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from experiments.calibrate.engine.timing import Call, input_sets, timed
from experiments.gpu.comparison import THRESHOLDS, relative_error
from experiments.gpu.record import Record, UnavailableError
from experiments.gpu.tile_search import DRY_RUN, SEARCHES, Search, Values, compiled, present, replaced
from kernels.ahead import CHIPS
from kernels.launch import target

END_S = 5.0  # seconds before the time limit at which a search stops
Tried = list[tuple[Values, "Future[dict[str, Any]]"]]


def run(record: Record) -> None:
    """Adds one row per search: the present tile, the candidates by time, and the gain of the fastest."""
    chip = target() if record.device.type == "cuda" else "sm_90"
    if chip not in CHIPS:
        record.measure("chip", lambda: _refuse(chip))
        return
    searches = DRY_RUN if record.quick else SEARCHES
    workers = 1 if record.quick else max(1, (os.cpu_count() or 2) - 1)
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    try:
        with _interpreting_nothing():
            tried = {search.name: _submit(pool, search, chip) for search in searches}
        for search in searches:
            record.measure(search.name, partial(_search, record, search, tried[search.name]))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, search: Search, chip: str) -> Tried:
    """Submits the compilation of each candidate; candidates that share a kernel are compiled once."""
    by_kernel: dict[tuple[tuple[str, int], ...], Future[dict[str, Any]]] = {}
    found: Tried = []
    for values in search.candidates():
        key = tuple((name, value) for name, value in values.items() if name not in search.not_compiled)
        if key not in by_kernel:
            by_kernel[key] = pool.submit(compiled, search, values, chip)
        found.append((values, by_kernel[key]))
    return found


def _search(record: Record, search: Search, tried: Tried) -> dict[str, Any]:
    case = search.make()
    calls = input_sets(case.make, record.device, case.bytes_moved)
    before = timed(calls, record.device, rep_ms=40)
    expected = calls[0]() if search.pure else None
    rows, cut = [], False
    for values, future in tried:
        if record.left_s < END_S:
            cut = True
            break
        rows.append({"tile": values, **_candidate(record, search, calls, values, future, expected)})
    usable = [row for row in rows if "median_s" in row and row.get("ok", True)]
    again = timed(calls, record.device, rep_ms=40)  # measured again: the noise of a difference
    now_s = min(before.median_s, again.median_s)
    best = min(usable, key=lambda row: row["median_s"], default=None)
    gain = now_s / best["median_s"] if best is not None else 1.0
    return {
        "present": str(present(search.module, target())),
        "present_s": now_s,
        "noise": abs(before.median_s - again.median_s) / now_s,
        "best": best,
        "gain": gain,
        "cut": cut,
        "candidates": sorted(rows, key=lambda row: row.get("median_s", float("inf"))),
        "said": f"{gain:.3f} times as fast as the present {now_s * 1e6:.1f} us"
        + (f" with {best['tile']}" if best else "; no candidate is usable")
        + (", stopped at the time limit" if cut else ""),
    }


def _candidate(
    record: Record,
    search: Search,
    calls: list[Call],
    values: Values,
    future: Future[dict[str, Any]],
    expected: object,
) -> dict[str, Any]:
    """Returns the compiler's figures, and the time of the candidate if it fits and does not spill."""
    try:
        use = future.result(timeout=max(record.left_s - END_S / 2, 0.1))
    except TimeoutError:
        return {"skipped": "not compiled in time"}
    if use["unusable"]:
        return use
    with replaced(search.module, values):
        try:
            found = calls[0]()
            right = _agrees(found, expected)
            return use | {"ok": right} | timed(calls, record.device, rep_ms=20).row()
        except (ValueError, RuntimeError) as error:
            if record.device.type == "cuda":
                torch.cuda.synchronize()  # raises if the GPU has become unusable
            return use | {"raised": f"{type(error).__name__}: {str(error)[:200]}"}


def _agrees(found: object, expected: object) -> bool:
    if not isinstance(found, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return True
    if not found.is_floating_point():
        return bool((found == expected).float().mean() >= 0.98)
    return relative_error(found.nan_to_num(), expected.nan_to_num()) <= THRESHOLDS[torch.bfloat16]


@contextmanager
def _interpreting_nothing() -> Iterator[None]:
    """Makes processes started inside the context compile kernels, even if this process interprets them."""
    before = os.environ.get("TRITON_INTERPRET", "0")
    os.environ["TRITON_INTERPRET"] = "0"
    try:
        yield
    finally:
        os.environ["TRITON_INTERPRET"] = before


def _refuse(chip: str) -> dict[str, Any]:
    raise UnavailableError(f"{chip} is not a target of kernels.ahead, which compiles for {', '.join(CHIPS)}")
