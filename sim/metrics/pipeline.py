"""Computes the use of pipeline stages: batches at once, bubbles by cause, waits for the host."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwmodels.assembly.roofline import Roofline
from hwmodels.iterations.iteration import IterationModel
from hwmodels.iterations.layout import InFlight
from hwmodels.speculation.model import SpeculativeModel
from sim.metrics.sums import Totals
from sim.metrics.utilisation import iteration_shape, share_inside
from sim.records.table import AnyTable, column


def add_pipeline(
    totals: Totals, iterations: AnyTable, inside_s: NDArray[np.float64], model: IterationModel
) -> None:
    """Adds the terms of `pipeline_figures` of up to `ROWS_AT_ONCE` iterations."""
    if not isinstance(model, Roofline | SpeculativeModel) or model.stages is None:
        return
    duration_s = column(iterations, "duration_s", np.float64)
    part = share_inside(inside_s, duration_s)
    shape = iteration_shape(iterations, model)
    if isinstance(model, Roofline):  # each iteration is one batch, of several in flight
        full = light = model.one_batch(shape)
        count = InFlight(1, 0)
        gpu_s, in_flight = np.minimum(full.all_s, duration_s), full.all_s / duration_s
    else:
        full, count, light = model.round(shape)
        slowest_s = reduce(np.maximum, model.stages.stage_seconds(full, count, light))
        gpu_s, in_flight = np.maximum(full.all_s, slowest_s), count.full + count.light
        drafting_s = np.broadcast_to(model.drafting_seconds(shape), part.shape)
        totals.add("stage_drafting_s", np.multiply(drafting_s, part))
    for index, stage in enumerate(model.stages.all):
        own_s = count.full * stage.seconds(full) + count.light * stage.seconds(light)
        totals.add(f"stage_{index}_s", np.multiply(own_s, part))
    totals.add("stage_total_s", inside_s)
    totals.add("stage_busy_s", np.multiply(count.full * full.all_s + count.light * light.all_s, part))
    totals.add("stage_gpu_s", np.multiply(gpu_s, part))
    totals.add("stage_in_flight_s", np.multiply(in_flight, inside_s))


def pipeline_figures(totals: Totals, model: IterationModel) -> dict[str, Any] | None:
    """Computes shares of the stages' time during iterations; returns None without pipeline parallelism.

    bubble_share = unequal_stages_share + few_micro_batches_share: a stage is idle because another one has
    more to do, or because there are fewer batches than stages need. host_share: all stages wait for the host.
    The rest is busy_share (sends included), also by stage. mean_micro_batches: batches that are on a stage at
    once. With speculation bubble_share has drafting_share, too: the last stage drafts after its passes, and
    the others wait.
    """
    total_s = totals["stage_total_s"]
    if not isinstance(model, Roofline | SpeculativeModel) or model.stages is None or total_s == 0:
        return None
    num_stages = len(model.stages.all)
    names = ("busy", "gpu", "in_flight", "drafting")
    busy_s, gpu_s, in_flight_s, drafting_s = (totals[f"stage_{name}_s"] for name in names)
    by_stage = np.array([totals[f"stage_{index}_s"] for index in range(num_stages)], np.float64)
    bound_s = float(by_stage.max())
    all_s = num_stages * total_s
    unequal, few = bound_s / total_s - busy_s / all_s, (gpu_s - bound_s) / total_s
    drafting = (num_stages - 1) * drafting_s / all_s
    by_stage[-1] += drafting_s
    figures = {
        "stages": num_stages,
        "mean_micro_batches": in_flight_s / total_s,
        "bubble_share": unequal + few + drafting,
        "unequal_stages_share": unequal,
        "few_micro_batches_share": few,
        "host_share": 1 - (gpu_s + drafting_s) / total_s,
        "busy_share": (busy_s + drafting_s) / all_s,
        "busy_share_by_stage": (by_stage / total_s).tolist(),
    }
    return figures | ({"drafting_share": drafting} if isinstance(model, SpeculativeModel) else {})
