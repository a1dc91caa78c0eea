"""Use of the hardware: GPU busy, MFU, MBU, and the pipeline stages of each pool.

MFU = model FLOPs done / (time x peak dense FLOP/s); MBU = (weights + KV bytes read) / (time x peak
bandwidth); GPU busy = share of the time in which an iteration runs. The time is summed over all replicas and
includes idle time. An iteration counts by the share of its time inside the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hwmodels.costs import joules_of_work
from sim.metrics.definitions import per, times
from sim.metrics.figure import EndedRun, Figure, FigureSetting, Part
from sim.metrics.pipeline import add_pipeline, pipeline_figures
from sim.metrics.sums import Totals
from sim.metrics.utilisation import PoolHardware, iteration_shape, pieces, share_inside
from sim.records.table import AnyTable


class Work(NamedTuple):
    """Work of a pool inside the window, and the most that its hardware could have done there."""

    flops: float
    moved_bytes: float
    busy_s: float
    peak_flops: float
    peak_bytes: float
    replica_s: float
    busy_joules: float | None
    """Energy of the iterations; None unless the power of the devices is known."""


class HardwareUse(Figure):
    """gpu_busy, mfu and mbu of all pools together, each a share (0 to 1); NaN in an empty window.

    For several pools: the sum of their work over the sum of what their devices could do.
    """

    name = "hardware_use"

    def __init__(self, setting: FigureSetting) -> None:
        super().__init__(setting)
        self.pools = [self.kept.totals() for _ in setting.pools]

    def merge(self, other: HardwareUse) -> None:
        for mine, theirs in zip(self.pools, other.pools, strict=True):
            mine.merge(theirs)

    def forget_measured(self) -> None:
        self.pools = [self.kept.totals() for _ in self.pools]

    def add(self, part: Part) -> None:
        for totals, pool, rows in zip(self.pools, part.setting.pools, part.rows_by_pool, strict=True):
            iterations, inside_s = part.iterations[rows], part.inside_s[rows]
            totals.add("busy_s", inside_s)
            for piece in pieces(len(iterations)):
                add_work(totals, iterations[piece], inside_s[piece], pool)
                add_pipeline(totals, iterations[piece], inside_s[piece], pool.model)

    def value(self, run: EndedRun) -> dict[str, float]:
        return use_of(self.works(run))

    def works(self, run: EndedRun) -> list[Work]:
        """Returns the work of each pool."""
        every = zip(self.pools, run.replica_s.tolist(), run.setting.pools, strict=True)
        return [_work_of(totals, seconds, pool) for totals, seconds, pool in every]

    def pipelines(self, run: EndedRun) -> list[dict[str, Any] | None]:
        """Returns the use of the pipeline stages of each pool."""
        every = zip(self.pools, run.setting.pools, strict=True)
        return [pipeline_figures(totals, pool.model) for totals, pool in every]


def use_of(works: Sequence[Work]) -> dict[str, float]:
    """Returns the figures of `HardwareUse`."""
    flops, moved_bytes, busy_s, peak_flops, peak_bytes, replica_s = (
        sum(part) for part in zip(*(work[:6] for work in works), strict=True)
    )
    return {
        "gpu_busy": per(busy_s, replica_s),
        "mfu": per(flops, peak_flops),
        "mbu": per(moved_bytes, peak_bytes),
    }


def add_work(totals: Totals, iterations: AnyTable, inside_s: NDArray[np.float64], pool: PoolHardware) -> None:
    """Adds the FLOPs, bytes and joules of up to `ROWS_AT_ONCE` iterations of a pool."""
    model, duration_s = pool.model, times(iterations, "duration_s")
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


def _work_of(totals: Totals, replica_s: float, pool: PoolHardware) -> Work:
    """Returns the work of a pool. replica_s: paid replica-seconds."""
    peaks = replica_s * pool.model.peak_flops_per_s, replica_s * pool.model.peak_bytes_per_s
    joules = None if pool.power is None else totals["joules"]
    return Work(totals["flops"], totals["moved_bytes"], totals["busy_s"], *peaks, replica_s, joules)
