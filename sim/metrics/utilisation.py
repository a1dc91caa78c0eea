"""How well the hardware was used: GPU busy, MFU, MBU, KV blocks, energy, and what the time was spent on.

MFU = model FLOPs done / (time x peak dense FLOP/s); MBU = (weights + KV bytes read) / (time x peak
bandwidth); GPU busy = share of time with an iteration running. Time is that of all replicas, idle or not.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hwmodels.energy import PowerModel, energy_joules, idle_joules
from hwmodels.iteration import COUNTED, AdapterBatch, IterationModel, IterationShape
from sim.metrics.window import Window
from sim.records import RunRecords

KINDS = ("decode", "mixed", "prefill")
"""Kinds of iteration: decodes only, both, prompt chunks only."""

_ROWS_AT_ONCE = 1 << 16  # Model answers hold a dozen arrays; in pieces they stay in the cache.


def seconds_inside(iterations: pd.DataFrame, window: Window) -> NDArray[np.float64]:
    """For each iteration, how much of it lies in the window."""
    return window.overlap_s(_column(iterations, "start_s"), _column(iterations, "duration_s"))


def hardware_use(
    records: RunRecords, window: Window, inside_s: NDArray[np.float64], model: IterationModel
) -> dict[str, float]:
    """gpu_busy, mfu and mbu, each a share (0 to 1); NaN in an empty window.

    An iteration that the window cuts counts by the part of its time inside.
    """
    part = _part_inside(records.iterations, inside_s)
    flops = moved_bytes = 0.0
    for rows in _pieces(len(part)):
        shape = iteration_shape(records.iterations.iloc[rows])
        flops += float(np.dot(np.broadcast_to(model.flops(shape), part[rows].shape), part[rows]))
        moved_bytes += float(np.dot(np.broadcast_to(model.bytes_moved(shape), part[rows].shape), part[rows]))
    replica_s = records.num_replicas * window.duration_s
    return {
        "gpu_busy": _share(float(inside_s.sum()), replica_s),
        "mfu": _share(flops, replica_s * model.peak_flops_per_s),
        "mbu": _share(moved_bytes, replica_s * model.peak_bytes_per_s),
    }


class EnergyUse(NamedTuple):
    """Of the boards of all replicas, inside the window."""

    busy_joules: float
    idle_joules: float
    device_s: float
    """Seconds of the window, times devices."""


def energy_use(
    records: RunRecords,
    window: Window,
    inside_s: NDArray[np.float64],
    model: IterationModel,
    power: PowerModel,
    num_devices_per_replica: int,
) -> EnergyUse:
    """Joules by each iteration's utilisation (`hwmodels.energy`), and of the time between iterations.

    An iteration that the window cuts counts by the part of its time inside.
    """
    part = _part_inside(records.iterations, inside_s)
    duration_s = _column(records.iterations, "duration_s")
    busy_joules = 0.0
    for rows in _pieces(len(part)):
        # What takes no time takes no energy; 1 s in its place keeps the division by time defined.
        seconds = np.where(duration_s[rows] > 0, duration_s[rows], 1.0)
        shape = iteration_shape(records.iterations.iloc[rows])
        joules = energy_joules(power, model, shape, seconds, num_devices=num_devices_per_replica)
        busy_joules += float(np.dot(joules, part[rows]))
    replica_s = records.num_replicas * window.duration_s
    idle_s = max(replica_s - float(inside_s.sum()), 0.0)
    return EnergyUse(
        busy_joules=busy_joules,
        idle_joules=idle_joules(power, idle_s, num_devices=num_devices_per_replica),
        device_s=num_devices_per_replica * replica_s,
    )


def kv_use(records: RunRecords, window: Window, inside_s: NDArray[np.float64]) -> dict[str, float]:
    """Shares of the KV blocks: mean over time and replicas, peak of any replica, and internal waste.

    An idle replica holds no block. internal_waste_share = reserved token places that hold no token, in the
    last block of each sequence, over all reserved ones: 10 tokens in 1 block of 16 waste 6 / 16 = 0.375.
    """
    blocks = _column(records.iterations, "kv_blocks_used")
    block_seconds = float(np.dot(blocks, inside_s))
    token_seconds = float(np.dot(_column(records.iterations, "kv_tokens_used"), inside_s))
    blocks_inside = blocks[inside_s > 0]
    peak_blocks = float(blocks_inside.max()) if len(blocks_inside) else 0.0
    return {
        "mean_use_share": _share(
            block_seconds, records.num_kv_blocks * records.num_replicas * window.duration_s
        ),
        "peak_use_share": _share(peak_blocks, records.num_kv_blocks),
        "internal_waste_share": 1 - _share(token_seconds, block_seconds * records.block_size),
    }


def prefill_time_share(iterations: pd.DataFrame, inside_s: NDArray[np.float64]) -> float:
    """Share of the busy time that prompts took; a mixed iteration's time is split by its tokens.

    30 ms with 90 prompt tokens and 10 decodes, and 10 ms of decodes alone: 27 / 40 = 0.675.
    """
    prefill = _column(iterations, "prefill_tokens")
    tokens = prefill + _column(iterations, "decode_seqs")
    share = np.divide(prefill, tokens, out=np.zeros_like(prefill), where=tokens > 0)
    return _share(float(np.dot(share, inside_s)), float(inside_s.sum()))


def seconds_by_kind(
    iterations: pd.DataFrame, inside_s: NDArray[np.float64], model: IterationModel
) -> dict[str, dict[str, float]]:
    """Busy seconds by kind of iteration (`KINDS`) and, within it, by component of the hardware model.

    The model's components are scaled to the recorded duration, so that every kind sums to the time it really
    took.
    """
    kind = iteration_kind(iterations)
    seconds: dict[str, dict[str, float]] = {name: {} for name in KINDS}
    for rows in _pieces(len(kind)):
        parts = model.breakdown(iteration_shape(iterations.iloc[rows]))
        shaped = {name: np.broadcast_to(part, inside_s[rows].shape) for name, part in parts.items()}
        whole = np.sum(list(shaped.values()), axis=0)
        scale = np.divide(inside_s[rows], whole, out=np.zeros_like(whole), where=whole > 0)
        for component, part in shaped.items():
            by_kind = np.bincount(kind[rows], weights=part * scale, minlength=len(KINDS))
            for name, value in zip(KINDS, by_kind, strict=True):
                seconds[name][component] = seconds[name].get(component, 0.0) + float(value)
    return seconds


def iteration_kind(iterations: pd.DataFrame) -> NDArray[np.int64]:
    """For each iteration the index of its kind in `KINDS`."""
    prefills, decodes = _column(iterations, "prefill_tokens") > 0, _column(iterations, "decode_seqs") > 0
    return np.where(prefills, np.where(decodes, 1, 2), 0).astype(np.int64)


def iteration_shape(iterations: pd.DataFrame) -> IterationShape:
    """The table's columns as the hardware model wants them, one value an iteration."""
    adapters = None
    if "adapter_tokens" in iterations:
        adapters = AdapterBatch(*(_column(iterations, f"adapter_{name}") for name in AdapterBatch._fields))
    return IterationShape(**{name: _column(iterations, name) for name in COUNTED}, adapters=adapters)


def _part_inside(iterations: pd.DataFrame, inside_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each iteration, the share of its time that lies in the window; 0 for one without any time."""
    duration_s = _column(iterations, "duration_s")
    return np.divide(inside_s, duration_s, out=np.zeros_like(inside_s), where=duration_s > 0)


def _column(table: pd.DataFrame, name: str) -> NDArray[np.float64]:
    return table[name].to_numpy(dtype=np.float64)


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else float("nan")


def _pieces(num_rows: int) -> list[slice]:
    return [slice(i, i + _ROWS_AT_ONCE) for i in range(0, num_rows, _ROWS_AT_ONCE)]
