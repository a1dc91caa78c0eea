"""Computes the use of pipeline stages: micro-batches, bubbles by cause, waits for the host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hwmodels.assembly.roofline import Roofline
from hwmodels.iterations.iteration import IterationModel
from hwmodels.speculation.model import SpeculativeModel
from sim.metrics.sums import weighted_sum
from sim.metrics.utilisation import iteration_shape
from sim.records.run import RunRecords

_ROWS_AT_ONCE = 1 << 16


def pipeline_use_by_pool(
    records: RunRecords, inside_s: NDArray[np.float64], models: Sequence[IterationModel]
) -> list[dict[str, Any] | None]:
    """Returns `pipeline_use` of each pool. models: one per pool."""
    return [
        pipeline_use(records.iterations[of_pool], inside_s[of_pool], model)
        for model, of_pool in zip(models, records.rows_by_pool(), strict=True)
    ]


def pipeline_use(
    iterations: pd.DataFrame, inside_s: NDArray[np.float64], model: IterationModel
) -> dict[str, Any] | None:
    """Computes shares of the stages' time during iterations; returns None without pipeline parallelism.

    bubble_share = unequal_stages_share + few_micro_batches_share: a stage is idle because a slower stage
    still has its next micro-batch, or because there are fewer micro-batches than stages need. host_share: all
    stages wait for the host. The rest is busy_share (sends included), also by stage. With speculation
    bubble_share has drafting_share, too: the last stage drafts after its passes, and the others wait.
    """
    if not isinstance(model, Roofline | SpeculativeModel) or model.stages is None:
        return None
    stages = model.stages.all
    by_stage, total_s, busy_s, bound_s, gpu_s, in_flight_s = np.zeros(len(stages)), 0.0, 0.0, 0.0, 0.0, 0.0
    drafting_s = 0.0
    for start in range(0, len(inside_s), _ROWS_AT_ONCE):
        rows = iterations.iloc[start : start + _ROWS_AT_ONCE]
        duration_s = rows["duration_s"].to_numpy(dtype=np.float64)
        spent_s = inside_s[start : start + _ROWS_AT_ONCE]
        part = np.divide(spent_s, duration_s, out=np.zeros_like(spent_s), where=duration_s > 0)
        shape = iteration_shape(rows, model)
        full, count, light = model.round(shape)
        if isinstance(model, SpeculativeModel):
            drafting_s += weighted_sum(np.broadcast_to(model.drafting_seconds(shape), part.shape), part)
        slowest_s = reduce(np.maximum, model.stages.stage_seconds(full, count, light))
        for index, stage in enumerate(stages):
            own_s = count.full * stage.seconds(full) + count.light * stage.seconds(light)
            by_stage[index] += weighted_sum(own_s, part)
        total_s += float(spent_s.sum())
        busy_s += weighted_sum(count.full * full.all_s + count.light * light.all_s, part)
        bound_s += weighted_sum(slowest_s, part)
        gpu_s += weighted_sum(np.maximum(full.all_s, slowest_s), part)
        in_flight_s += weighted_sum(count.full + count.light, spent_s)
    if total_s == 0:
        return None
    all_s = len(stages) * total_s
    unequal, few = bound_s / total_s - busy_s / all_s, (gpu_s - bound_s) / total_s
    drafting = (len(stages) - 1) * drafting_s / all_s
    by_stage[-1] += drafting_s
    figures = {
        "stages": len(stages),
        "mean_micro_batches": in_flight_s / total_s,
        "bubble_share": unequal + few + drafting,
        "unequal_stages_share": unequal,
        "few_micro_batches_share": few,
        "host_share": 1 - (gpu_s + drafting_s) / total_s,
        "busy_share": (busy_s + drafting_s) / all_s,
        "busy_share_by_stage": (by_stage / total_s).tolist(),
    }
    return figures | ({"drafting_share": drafting} if isinstance(model, SpeculativeModel) else {})
