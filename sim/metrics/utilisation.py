"""The hardware of pools, and what the rows of iterations say of it: shapes, kinds, components, seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwmodels.costs import PowerModel
from hwmodels.iterations import COUNTED, AdapterBatch, DraftWork, IterationModel, IterationShape
from hwmodels.speculation import SpeculativeModel
from sim.metrics.definitions import Window, times
from sim.records.iterations import ADAPTER_COLUMNS
from sim.records.run import PoolRecord, RunRecords
from sim.records.table import AnyTable, column
from sim.speculation.log import DRAFT_WORK_COLUMNS

KINDS = ("decode", "mixed", "prefill")
"""Kinds of iteration: decodes only, decodes and prompt chunks, prompt chunks only."""

ROWS_AT_ONCE = 1 << 16  # The model returns a dozen arrays; batches of rows keep them in the CPU cache.


def seconds_inside(iterations: AnyTable, window: Window) -> NDArray[np.float64]:
    """Computes, for each iteration, its seconds inside the window."""
    return window.overlap_s(times(iterations, "start_s"), times(iterations, "duration_s"))


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


def share_inside(inside_s: NDArray[np.float64], duration_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Computes the share of each iteration that is inside the window; 0 for an iteration of 0 s."""
    return np.divide(inside_s, duration_s, out=np.zeros_like(inside_s), where=duration_s > 0)


def of_pools(pools: Sequence[PoolRecord], name: str, pool: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns a figure of `PoolRecord` for each index of a pool."""
    return np.array([getattr(one, name) for one in pools], np.float64)[pool]


def component_seconds(
    iterations: AnyTable, inside_s: NDArray[np.float64], model: IterationModel
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


def iteration_kind(iterations: AnyTable) -> NDArray[np.int64]:
    """Returns, for each iteration, the index of its kind in `KINDS`."""
    prefills, decodes = times(iterations, "prefill_tokens") > 0, times(iterations, "decode_seqs") > 0
    return np.where(prefills, np.where(decodes, 1, 2), 0).astype(np.int64)


def batch_tokens(iterations: AnyTable) -> NDArray[np.int64]:
    """Returns the tokens in the batch of each iteration: prompt tokens, decodes and their draft tokens."""
    tokens: NDArray[np.int64] = column(iterations, "decode_seqs") + column(iterations, "prefill_tokens")
    if "draft_tokens" in iterations:
        tokens = tokens + column(iterations, "draft_tokens")
    return tokens


def iteration_shape(iterations: AnyTable, model: IterationModel) -> IterationShape:
    """Returns the columns of the table as arguments of the hardware model, one value per iteration."""
    adapters = None
    if "adapter_tokens" in iterations:
        adapters = AdapterBatch(*(times(iterations, name) for name in ADAPTER_COLUMNS))
    drafts = None
    if isinstance(model, SpeculativeModel) and "draft_tokens" in iterations:
        drafts = DraftWork(*(times(iterations, name) for name in DRAFT_WORK_COLUMNS))
    counts: dict[str, Any] = {name: times(iterations, name) for name in COUNTED}
    return IterationShape(**counts, adapters=adapters, drafts=drafts)


def one_shape(iterations: AnyTable, row: int, model: IterationModel) -> IterationShape:
    """Returns the arguments of the hardware model for one iteration, as numbers."""
    shape = iteration_shape(iterations[row : row + 1], model)
    counts: dict[str, Any] = {name: _number(getattr(shape, name)) for name in COUNTED}
    adapters = None if shape.adapters is None else AdapterBatch(*map(_number, shape.adapters))
    drafts = None if shape.drafts is None else DraftWork(*map(_number, shape.drafts))
    return shape._replace(**counts, adapters=adapters, drafts=drafts)


def _number(values: Any) -> float:
    return float(np.squeeze(values))


def pieces(num_rows: int) -> list[slice]:
    """Returns slices of at most `ROWS_AT_ONCE` rows."""
    return [slice(i, i + ROWS_AT_ONCE) for i in range(0, num_rows, ROWS_AT_ONCE)]
