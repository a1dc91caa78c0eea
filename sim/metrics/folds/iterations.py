"""Sums over the iterations of a run, from parts of their table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.metrics.assembly import add_iterations
from sim.metrics.folds.exact import ExactTotals
from sim.metrics.folds.setting import FoldSetting
from sim.metrics.folds.times import TimesFold
from sim.metrics.pipeline import add_pipeline, pipeline_figures
from sim.metrics.speculation import add_draft_counts, add_flops
from sim.metrics.utilisation import (
    PoolHardware,
    Work,
    add_kv_use,
    add_prefill_time,
    add_work,
    pieces,
    seconds_inside,
    work_of,
)
from sim.metrics.waste import add_kv_waste
from sim.metrics.window import Window


class PoolFolds:
    """Work and pipeline of each pool inside the window."""

    def __init__(self, num_pools: int) -> None:
        self._totals = [ExactTotals() for _ in range(num_pools)]

    def add(
        self, index: int, iterations: pd.DataFrame, inside_s: NDArray[np.float64], pool: PoolHardware
    ) -> None:
        """Adds iterations of a pool. inside_s: seconds of each inside the window."""
        totals = self._totals[index]
        totals.add("busy_s", inside_s)
        for rows in pieces(len(iterations)):
            part = iterations.iloc[rows]
            add_work(totals, part, inside_s[rows], pool)
            add_pipeline(totals, part, inside_s[rows], pool.model)

    def merge(self, other: PoolFolds) -> None:
        """Adds the sums of other, which is not changed."""
        for mine, theirs in zip(self._totals, other._totals, strict=True):
            mine.merge(theirs)

    def works(self, replica_s: NDArray[np.float64], setting: FoldSetting) -> list[Work]:
        """Returns the work of each pool. replica_s: paid replica-seconds of each."""
        every = zip(self._totals, replica_s.tolist(), setting.pools, strict=True)
        return [work_of([totals], totals["busy_s"], seconds, pool) for totals, seconds, pool in every]

    def pipelines(self, setting: FoldSetting) -> list[dict[str, Any] | None]:
        """Returns the use of the pipeline stages of each pool."""
        every = zip(self._totals, setting.pools, strict=True)
        return [pipeline_figures(totals, pool.model) for totals, pool in every]


def add_iteration_sums(
    inside: ExactTotals,
    pools: PoolFolds,
    iterations: pd.DataFrame,
    pool_by_replica: NDArray[np.int64],
    window: Window,
    setting: FoldSetting,
    times: TimesFold | None = None,
) -> None:
    """Adds the sums of iterations inside the window. times: where their seconds by kind are added."""
    inside_s = seconds_inside(iterations, window)
    pool = pool_by_replica[iterations["replica"].to_numpy()]
    add_iterations(inside, iterations, inside_s > 0)
    add_prefill_time(inside, iterations, inside_s)
    for add_kv in (add_kv_use, add_kv_waste):
        add_kv(inside, iterations, inside_s, setting.pool_records, pool)
    ends_inside = window.holds(np.minimum(ends_s(iterations), window.end_s))
    if "kept_tokens" in iterations:
        inside.add("kept_inside", iterations["kept_tokens"].to_numpy()[ends_inside])
        add_draft_counts(inside, iterations[ends_inside])
    for index, hardware in enumerate(setting.pools):
        rows = slice(None) if len(setting.pools) == 1 else pool == index
        pools.add(index, iterations[rows], inside_s[rows], hardware)
        if times is not None:
            times.add(index, iterations[rows], inside_s[rows], hardware.model)
        if "kept_tokens" in iterations:
            drafting = iterations[rows][ends_inside[rows]]
            for part in pieces(len(drafting)):
                add_flops(inside, drafting.iloc[part], hardware.model)


def ends_s(iterations: pd.DataFrame) -> NDArray[np.float64]:
    """Returns the ends of iterations, s."""
    found: NDArray[np.float64] = (iterations["start_s"] + iterations["duration_s"]).to_numpy(np.float64)
    return found
