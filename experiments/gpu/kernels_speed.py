"""Measures the kernels' bytes/s and FLOP/s, as shares of this run's limits and beside torch's own kernels.

The cases that have a target come first, with torch's kernels beside them; then the cases of all modules as
far as time permits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from experiments.calibrate.engine.timing import input_sets, timed
from experiments.gpu.limits import Limits, linear_timing
from experiments.gpu.peers import attention_peers, flex_peer, simple_peers
from experiments.gpu.record import Record
from experiments.gpu.speed_cases import (
    SPEEDUP_ROWS,
    W4_LAYERS,
    Target,
    others,
    shares,
    targeted,
    w4a16_case,
)
from kernels.case import Case

LIMIT_NAMES = {"copy": "copied bytes", "bf16": "bf16 GEMM"}
SDPA_AT_LEAST = 0.8
W4A16_AT_LEAST = 2.2
FLEX_S = 60.0  # flex_attention is not begun with less time left than this


def run(record: Record) -> None:
    """Times the cases that have targets, torch's kernels, and then all other cases."""
    device, quick = record.device, record.quick
    known = Limits.of(record.folder)
    limits = {"copy": known.copy_bytes_per_s, "bf16": known.bf16_flops_per_s}
    for case, target in targeted(quick):
        record.measure(case.name, partial(_timed_case, case, limits, device, target))
    _attention_beside(record, "prefill", (1, 24, 24) if quick else (1, 8192, 8192), SDPA_AT_LEAST)
    _attention_beside(record, "decode", (2, 1, 40) if quick else (16, 1, 4096), None)
    for layer, (k, n) in ({"o": (128, 48)} if quick else W4_LAYERS).items():
        for m in SPEEDUP_ROWS[:1] if quick else SPEEDUP_ROWS:
            name = f"w4a16/{layer}-m{m}"
            record.measure(name, partial(_w4a16, m, k, n, limits, device))
    for name, moved, peer in simple_peers(device, *((3, 64, 96) if quick else (8192, 4096, 14336))):
        record.measure(name, partial(_rated, peer, moved, limits))
    for case in others(quick):
        record.measure(case.name, partial(_timed_case, case, limits, device, None))
    for kind, sizes in (("prefill", (1, 8192, 8192)), ("decode", (16, 1, 4096))):
        record.measure(f"{kind}_attention/flex", partial(flex_peer, device, *sizes), least_s=FLEX_S)


def _timed_case(
    case: Case, limits: dict[str, float | None], device: torch.device, target: Target | None
) -> dict[str, Any]:
    found = timed(input_sets(case.make, device, case.bytes_moved), device)
    row = found.row() | shares(case, found.median_s, limits)
    if target is None:
        return row
    reached = row.get(f"{target.share_of}_share")
    return row | _against(reached, target.at_least, f"of {LIMIT_NAMES[target.share_of]}", found.median_s)


def _against(reached: float | None, at_least: float, of: str, seconds: float) -> dict[str, Any]:
    """Returns the target, the value reached, and whether the target is met."""
    took = f"{seconds * 1e6:.1f} us"
    if reached is None:
        return {"target": at_least, "said": f"{took}; {of}: the limit was not measured"}
    met = reached >= at_least
    summary = f"{took}, {reached:.2f} {of}, target {at_least:.2f}: {'met' if met else 'NOT met'}"
    return {"target": at_least, "reached": reached, "met": met, "said": summary}


def _rated(
    peer: Callable[[], dict[str, Any]], moved: float, limits: dict[str, float | None]
) -> dict[str, Any]:
    row, copied = peer(), limits["copy"]
    return row | ({"copy_share": moved / row["median_s"] / copied} if copied else {})


def _attention_beside(record: Record, kind: str, sizes: tuple[int, int, int], at_least: float | None) -> None:
    """Times torch's attention at a size at which ours was timed, and adds the speedup over the fastest."""
    ours = next(
        (row for row in record.rows if row["name"].startswith(f"{kind}_attention/") and "median_s" in row),
        None,
    )
    best = None
    for name, peer in attention_peers(record.device, *sizes):
        row = record.measure(f"{kind}_attention/{name}", peer)
        if row is not None and (best is None or row["median_s"] < best["median_s"]):
            best = row
    if ours is None or best is None:
        return

    def ratio() -> dict[str, Any]:
        times = best["median_s"] / ours["median_s"]
        about = {"ours_s": ours["median_s"], "best_s": best["median_s"], "best": best["name"]}
        if at_least is None:
            return about | {"speedup": times, "said": f"{times:.2f} times as fast as {best['name']}"}
        return about | _against(times, at_least, f"times the speed of {best['name']}", ours["median_s"])

    record.measure(f"{kind}_attention/beside_best_sdpa", ratio, least_s=0.0)


def _w4a16(m: int, k: int, n: int, limits: dict[str, float | None], device: torch.device) -> dict[str, Any]:
    """Times the int4 product and torch's bf16 product at the same sizes."""
    case = w4a16_case(m, k, n)
    found = timed(input_sets(case.make, device, case.bytes_moved), device)
    dense = linear_timing(m, k, n, device)
    row = found.row() | shares(case, found.median_s, limits) | {"dense_s": dense.median_s}
    return row | _against(
        dense.median_s / found.median_s, W4A16_AT_LEAST, "times the speed of bf16 cuBLAS", found.median_s
    )
