"""Computes the utilisation of the hardware: GPU busy, MFU, MBU, KV blocks, energy, and time by component.

MFU = model FLOPs done / (time x peak dense FLOP/s); MBU = (weights + KV bytes read) / (time x peak
bandwidth); GPU busy = share of the time in which an iteration runs. The time is summed over all replicas and
includes idle time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hwmodels.iterations.energy import PowerModel, idle_joules, joules_of_work
from hwmodels.iterations.iteration import COUNTED, AdapterBatch, DraftWork, IterationModel, IterationShape
from hwmodels.speculation.model import SpeculativeModel
from sim.metrics.sums import TableTotals, Totals, weighted_sum
from sim.metrics.window import Window
from sim.records.iterations import ADAPTER_COLUMNS
from sim.records.run import PoolRecord, RunRecords
from sim.speculation.log import DRAFT_WORK_COLUMNS

KINDS = ("decode", "mixed", "prefill")
"""Kinds of iteration: decodes only, decodes and prompt chunks, prompt chunks only."""

ROWS_AT_ONCE = 1 << 16  # The model returns a dozen arrays; batches of rows keep them in the CPU cache.


def seconds_inside(iterations: pd.DataFrame, window: Window) -> NDArray[np.float64]:
    """Computes, for each iteration, its seconds inside the window."""
    return window.overlap_s(_column(iterations, "start_s"), _column(iterations, "duration_s"))


def rented_s(records: RunRecords, window: Window) -> NDArray[np.float64]:
    """Computes, for each pool, the paid replica-seconds inside the window."""
    start_s, end_s = (np.array([getattr(r, name) for r in records.replicas]) for name in ("start_s", "end_s"))
    seconds = window.overlap_s(start_s, end_s - start_s)
    by_pool: NDArray[np.float64] = np.zeros(len(records.pools))
    np.add.at(by_pool, records.pool_by_replica, seconds)
    return by_pool


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolHardware:
    """The hardware of each replica of a pool, as far as figures depend on it."""

    model: IterationModel
    price_usd_per_hour: float = 0.0
    """Price of one replica."""
    power: PowerModel | None = None
    """Power model of one device."""
    num_devices: int = 1
    """Devices per replica."""


class Work(NamedTuple):
    """Work of a pool inside the window, and the most that its hardware could have done there."""

    flops: float
    moved_bytes: float
    busy_s: float
    peak_flops: float
    peak_bytes: float
    replica_s: float
    busy_joules: tuple[float, ...] | None
    """Energy of the iterations, summed over runs of rows; None unless the power of the devices is known."""


def work_by_pool(
    records: RunRecords, window: Window, inside_s: NDArray[np.float64], pools: Sequence[PoolHardware]
) -> list[Work]:
    """Computes the work of each pool. An iteration counts by the share of its time inside the window."""
    found = []
    replica_s = rented_s(records, window).tolist()
    for pool, of_pool, seconds in zip(pools, records.rows_by_pool(), replica_s, strict=True):
        iterations, own_s = records.iterations[of_pool], inside_s[of_pool]
        parts: list[Totals] = []
        for rows in pieces(len(own_s)):
            parts.append(TableTotals())
            add_work(parts[-1], iterations.iloc[rows], own_s[rows], pool)
        busy_s = float(own_s.sum())
        found.append(work_of(parts, busy_s, seconds, pool))
    return found


def add_work(
    totals: Totals, iterations: pd.DataFrame, inside_s: NDArray[np.float64], pool: PoolHardware
) -> None:
    """Adds the FLOPs, bytes and joules of up to `ROWS_AT_ONCE` iterations of a pool."""
    model, duration_s = pool.model, _column(iterations, "duration_s")
    part = share_inside(inside_s, duration_s)
    shape = iteration_shape(iterations, model)
    done = model.flops(shape), model.bytes_moved(shape)
    totals.add("flops", np.multiply(done[0], part))
    totals.add("moved_bytes", np.multiply(done[1], part))
    if pool.power is not None:
        # An iteration of 0 s uses no energy; 1 s instead keeps the division by time defined.
        some_s = np.where(duration_s > 0, duration_s, 1.0)
        used = joules_of_work(pool.power, model, *done, some_s, num_devices=pool.num_devices)
        totals.add("joules", np.multiply(used, part))


def work_of(parts: Sequence[Totals], busy_s: float, replica_s: float, pool: PoolHardware) -> Work:
    """Returns the work of a pool. parts: sums of `add_work`; replica_s: paid replica-seconds."""
    flops = moved_bytes = 0.0
    for part in parts:
        flops += part["flops"]
        moved_bytes += part["moved_bytes"]
    peaks = replica_s * pool.model.peak_flops_per_s, replica_s * pool.model.peak_bytes_per_s
    joules = None if pool.power is None else tuple(part["joules"] for part in parts)
    return Work(flops, moved_bytes, busy_s, *peaks, replica_s, joules)


def share_inside(inside_s: NDArray[np.float64], duration_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Computes the share of each iteration that is inside the window; 0 for an iteration of 0 s."""
    return np.divide(inside_s, duration_s, out=np.zeros_like(inside_s), where=duration_s > 0)


def hardware_use(works: Sequence[Work]) -> dict[str, float]:
    """Computes gpu_busy, mfu and mbu, each a share (0 to 1); NaN in an empty window.

    For several pools: the sum of their work over the sum of what their devices could do.
    """
    flops, moved_bytes, busy_s, peak_flops, peak_bytes, replica_s = (
        sum(part) for part in zip(*(work[:6] for work in works), strict=True)
    )
    return {
        "gpu_busy": _share(busy_s, replica_s),
        "mfu": _share(flops, peak_flops),
        "mbu": _share(moved_bytes, peak_bytes),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class EnergyUse:
    """Energy of the GPU boards of all replicas inside the window."""

    busy_joules: float
    idle_joules: float
    device_s: float
    """Paid device-seconds."""
    largest_tdp_w: float
    """Largest power limit of a device."""


def energy_use(works: Sequence[Work], pools: Sequence[PoolHardware]) -> EnergyUse | None:
    """Computes the energy of iterations by their utilisation (`hwmodels.iterations.energy`) and of idle time.

    Returns None unless the power of all devices is known.
    """
    busy = idle = device_s = largest_tdp_w = 0.0
    for pool, work in zip(pools, works, strict=True):
        if pool.power is None or work.busy_joules is None:
            return None
        for joules in work.busy_joules:
            busy += joules
        idle_s = max(work.replica_s - work.busy_s, 0.0)
        idle += float(idle_joules(pool.power, idle_s, num_devices=pool.num_devices))
        device_s += pool.num_devices * work.replica_s
        largest_tdp_w = max(largest_tdp_w, pool.power.tdp_w)
    return EnergyUse(busy_joules=busy, idle_joules=idle, device_s=device_s, largest_tdp_w=largest_tdp_w)


def pool_of_rows(records: RunRecords) -> NDArray[np.int64]:
    """Returns the index of the pool of each iteration."""
    found: NDArray[np.int64] = records.pool_by_replica[records.iterations["replica"].to_numpy()]
    return found


def of_pools(pools: Sequence[PoolRecord], name: str, pool: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns a figure of `PoolRecord` for each index of a pool."""
    return np.array([getattr(one, name) for one in pools], np.float64)[pool]


def add_kv_use(
    totals: Totals,
    iterations: pd.DataFrame,
    inside_s: NDArray[np.float64],
    pools: Sequence[PoolRecord],
    pool: NDArray[np.int64],
) -> None:
    """Adds the terms of `kv_use_figures`. pool: index of the pool of each iteration."""
    blocks = _column(iterations, "kv_blocks_used")
    totals.add("kv_place_s", blocks * of_pools(pools, "block_size", pool) * inside_s)
    totals.add("kv_token_s", _column(iterations, "kv_tokens_used") * inside_s)
    totals.add("kv_block_s", blocks * inside_s)
    all_blocks = of_pools(pools, "num_kv_blocks", pool)
    shares = np.divide(blocks, all_blocks, out=np.full_like(blocks, np.nan), where=all_blocks > 0)[
        inside_s > 0
    ]
    totals.add("kv_unknown", np.isnan(shares))
    totals.raise_to("kv_peak_share", shares[~np.isnan(shares)])


def kv_use_figures(
    totals: Totals, pools: Sequence[PoolRecord], replica_s: NDArray[np.float64]
) -> dict[str, float]:
    """Computes shares of KV blocks in use: mean over time and replicas, peak of any replica, internal waste.

    An idle replica uses no block. internal_waste_share = empty token slots in the last block of each sequence
    over all token slots in use: 10 tokens in 1 block of 16 waste 6 / 16 = 0.375. replica_s: `rented_s`.
    """
    num_blocks = [pool.num_kv_blocks for pool in pools]
    is_known = any(num_blocks) and not totals["kv_unknown"]
    return {
        "mean_use_share": _share(totals["kv_block_s"], weighted_sum(num_blocks, replica_s)),
        "peak_use_share": float(totals.largest("kv_peak_share")) if is_known else float("nan"),
        "internal_waste_share": 1 - _share(totals["kv_token_s"], totals["kv_place_s"]),
    }


def add_prefill_time(totals: Totals, iterations: pd.DataFrame, inside_s: NDArray[np.float64]) -> None:
    """Adds the terms of `prefill_share_of`."""
    prefill = _column(iterations, "prefill_tokens")
    tokens = batch_tokens(iterations)
    share = np.divide(prefill, tokens, out=np.zeros_like(prefill), where=tokens > 0)
    totals.add("prefill_s", share * inside_s)
    totals.add("inside_s", inside_s)


def prefill_share_of(totals: Totals) -> float:
    """Computes the share of the busy time spent on prompts; a mixed iteration is split by its tokens.

    Example: 30 ms with 90 prompt tokens and 10 decodes, and 10 ms of decodes alone: 27 / 40 = 0.675.
    """
    return min(_share(totals["prefill_s"], totals["inside_s"]), 1.0)  # the sums are rounded


def seconds_by_kind(
    records: RunRecords, inside_s: NDArray[np.float64], models: Sequence[IterationModel]
) -> dict[str, dict[str, float]]:
    """Computes busy seconds by kind of iteration (`KINDS`), and within it by component of the hardware model.

    models: one per pool. The components are scaled to the recorded duration, so that the seconds of a kind
    sum to its recorded time.
    """
    seconds: dict[str, dict[str, float]] = {name: {} for name in KINDS}
    for model, of_pool in zip(models, records.rows_by_pool(), strict=True):
        iterations, own_s = records.iterations[of_pool], inside_s[of_pool]
        kind = iteration_kind(iterations)
        for rows in pieces(len(kind)):
            for component, part in component_seconds(iterations.iloc[rows], own_s[rows], model):
                by_kind = np.bincount(kind[rows], weights=part, minlength=len(KINDS))
                for name, value in zip(KINDS, by_kind, strict=True):
                    seconds[name][component] = seconds[name].get(component, 0.0) + float(value)
    return seconds


def component_seconds(
    iterations: pd.DataFrame, inside_s: NDArray[np.float64], model: IterationModel
) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """Yields the components of the hardware model, and their seconds in up to `ROWS_AT_ONCE` iterations.

    inside_s: the seconds of each iteration, to which its components are scaled.
    """
    parts = model.breakdown(iteration_shape(iterations, model))
    shaped = {name: np.broadcast_to(part, inside_s.shape) for name, part in parts.items()}
    whole = np.sum(list(shaped.values()), axis=0)
    scale = np.divide(inside_s, whole, out=np.zeros_like(whole), where=whole > 0)
    for component, part in shaped.items():
        yield component, part * scale


def iteration_kind(iterations: pd.DataFrame) -> NDArray[np.int64]:
    """Returns, for each iteration, the index of its kind in `KINDS`."""
    prefills, decodes = _column(iterations, "prefill_tokens") > 0, _column(iterations, "decode_seqs") > 0
    return np.where(prefills, np.where(decodes, 1, 2), 0).astype(np.int64)


def batch_tokens(iterations: pd.DataFrame) -> NDArray[np.int64]:
    """Returns the tokens in the batch of each iteration: prompt tokens, decodes and their draft tokens."""
    tokens: NDArray[np.int64] = (iterations["decode_seqs"] + iterations["prefill_tokens"]).to_numpy()
    if "draft_tokens" in iterations:
        tokens = tokens + iterations["draft_tokens"].to_numpy()
    return tokens


def iteration_shape(iterations: pd.DataFrame, model: IterationModel) -> IterationShape:
    """Returns the columns of the table as arguments of the hardware model, one value per iteration."""
    adapters = None
    if "adapter_tokens" in iterations:
        adapters = AdapterBatch(*(_column(iterations, name) for name in ADAPTER_COLUMNS))
    drafts = None
    if isinstance(model, SpeculativeModel) and "draft_tokens" in iterations:
        drafts = DraftWork(*(_column(iterations, name) for name in DRAFT_WORK_COLUMNS))
    counts: dict[str, Any] = {name: _column(iterations, name) for name in COUNTED}
    return IterationShape(**counts, adapters=adapters, drafts=drafts)


def one_shape(iterations: pd.DataFrame, row: int, model: IterationModel) -> IterationShape:
    """Returns the arguments of the hardware model for one iteration, as numbers."""
    shape = iteration_shape(iterations.iloc[row : row + 1], model)
    counts: dict[str, Any] = {name: _number(getattr(shape, name)) for name in COUNTED}
    adapters = None if shape.adapters is None else AdapterBatch(*map(_number, shape.adapters))
    drafts = None if shape.drafts is None else DraftWork(*map(_number, shape.drafts))
    return shape._replace(**counts, adapters=adapters, drafts=drafts)


def _number(values: Any) -> float:
    return float(np.squeeze(values))


def _column(table: pd.DataFrame, name: str) -> NDArray[np.float64]:
    return table[name].to_numpy(dtype=np.float64)


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else float("nan")


def pieces(num_rows: int) -> list[slice]:
    """Returns slices of at most `ROWS_AT_ONCE` rows."""
    return [slice(i, i + ROWS_AT_ONCE) for i in range(0, num_rows, ROWS_AT_ONCE)]
