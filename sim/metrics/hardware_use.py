"""Use and costs of the hardware: GPU busy, MFU, MBU, pipeline stages; prices, energy and training.

MFU = model FLOPs done / (time x peak dense FLOP/s); MBU = (weights + KV bytes read) / (time x peak
bandwidth); GPU busy = share of the time in which an iteration runs. The time is summed over all replicas and
includes idle time. An iteration counts by the share of its time inside the window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hwmodels.assembly.roofline import Roofline
from hwmodels.costs import (
    EnergySettings,
    break_even_load,
    idle_joules,
    joules_of_work,
    split_cost,
    tokens_to_match_training,
    training_flops,
)
from hwmodels.iterations import IterationModel
from hwmodels.iterations.layout import InFlight
from hwmodels.speculation import SpeculativeModel
from sim.metrics.definitions import per, times
from sim.metrics.figure import (
    EndedRun,
    Figure,
    FigureSetting,
    Part,
    PoolHardware,
    batch_tokens,
    iteration_shape,
    pieces,
    share_inside,
)
from sim.metrics.output import Output, OutputFigure
from sim.metrics.sums import Totals, weighted_sum
from sim.records.table import AnyTable, column


class Work(NamedTuple):
    """Work of a pool inside the window, and the maximum work of its hardware in that time."""

    flops: float
    moved_bytes: float
    busy_s: float
    peak_flops: float
    peak_bytes: float
    replica_s: float
    busy_joules: float | None
    """Energy of the iterations; None unless the power of the devices is known."""


class HardwareUse(Figure):
    """gpu_busy, mfu and mbu over all pools, each a share (0 to 1); NaN in an empty window.

    For several pools: the sum of their work divided by the sum of their capacities.
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
    """Returns the metrics of `HardwareUse`."""
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
        # An iteration of 0 s uses no energy; using 1 s keeps the division by time defined.
        some_s = np.where(duration_s > 0, duration_s, 1.0)
        used = joules_of_work(pool.power, model, *done, some_s, num_devices=pool.num_devices)
        totals.add("joules", np.multiply(used, part))


def _work_of(totals: Totals, replica_s: float, pool: PoolHardware) -> Work:
    """Returns the work of a pool. replica_s: paid replica-seconds."""
    peaks = replica_s * pool.model.peak_flops_per_s, replica_s * pool.model.peak_bytes_per_s
    joules = None if pool.power is None else totals["joules"]
    return Work(totals["flops"], totals["moved_bytes"], totals["busy_s"], *peaks, replica_s, joules)


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
    more work, or because there are fewer batches than stages. host_share: all stages wait for the host. The
    rest is busy_share (including sends), also per stage. mean_micro_batches: mean number of batches on stages
    at the same time. With speculation bubble_share also includes drafting_share: the last stage drafts after
    its passes, and the others wait.
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


SECONDS_PER_YEAR = 365 * 24 * 3600.0


class Cost(Figure):
    """Cost of all replicas, including idle time, per hour, token and request.

    usd_per_million_output_tokens assigns the total cost to the output; `split`: `hwmodels.costs.split_cost`,
    by the share of the busy time spent on prompts. A mixed iteration is split by its tokens: 30 ms with 90
    prompt tokens and 10 decodes, and 10 ms of decodes alone: 27 / 40 = 0.675.
    """

    name = "cost"

    def add(self, part: Part) -> None:
        prefill, tokens = times(part.iterations, "prefill_tokens"), batch_tokens(part.iterations)
        share = np.divide(prefill, tokens, out=np.zeros_like(prefill), where=tokens > 0)
        self.inside.add("prefill_s", share * part.inside_s)
        self.inside.add("inside_s", part.inside_s)

    @property
    def prefill_share(self) -> float:
        """Share of the busy time spent on prompts."""
        return min(per(self.inside["prefill_s"], self.inside["inside_s"]), 1.0)  # the sums are rounded

    def value(self, run: EndedRun) -> dict[str, Any]:
        pools, output = run.setting.pools, output_of(run)
        usd = weighted_sum([pool.price_usd_per_hour for pool in pools], run.replica_s) / 3600
        prefill_share = self.prefill_share
        split = split_cost(
            usd=usd,
            prefill_time_share=0.0 if math.isnan(prefill_share) else prefill_share,
            num_input_tokens=output.input_tokens,
            num_output_tokens=output.output_tokens,
            num_requests=output.requests,
        )
        return {
            "usd": usd,
            "device_hours": weighted_sum([pool.num_devices for pool in pools], run.replica_s) / 3600,
            "usd_per_hour": per(usd, run.window.duration_s / 3600),
            "usd_per_million_output_tokens": per(usd * 1e6, output.output_tokens),
            "usd_per_1000_requests": split.usd_per_thousand_requests,
            "split": {
                "prefill_time_share": prefill_share,
                "usd_per_million_input_tokens": split.usd_per_million_input_tokens,
                "usd_per_million_output_tokens": split.usd_per_million_output_tokens,
            },
        }


class Bill(Figure):
    """The bill of all clients over the whole run, in USD: served prompts, all output, pinned prefixes.

    None without a tariff.
    """

    name = "bill_usd"

    def add(self, part: Part) -> None:
        tariff, requests = part.setting.tariff, part.requests
        if tariff is None:
            return
        served = requests[~np.isnan(times(requests, "first_token_s"))]
        cached = column(served, "cached_tokens")
        found = np.where(cached >= tariff.min_cached_tokens, cached, 0)
        self.whole.add("input", column(served, "prompt_tokens"))
        self.whole.add("found", found)
        self.whole.add("written", np.maximum(column(served, "pinned_tokens") - found, 0))
        self.whole.add("output", column(requests, "output_tokens"))

    def value(self, run: EndedRun) -> float | None:
        tariff = run.setting.tariff
        if tariff is None:
            return None
        return tariff.bill_usd(
            input_tokens=float(self.whole["input"]),
            found=float(self.whole["found"]),
            written=float(self.whole["written"]),
            output_tokens=float(self.whole["output"]),
            pinned_token_s=run.records.pinned_token_s,
        )


def break_even(cost: dict[str, Any], bill_usd: float | None) -> dict[str, float]:
    """Returns the load above which the replicas are cheaper than the bill; empty without a bill."""
    return {} if bill_usd is None else {"break_even_load": break_even_load(cost["usd"], bill_usd)}


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
    """Computes the energy of iterations by their utilisation (`hwmodels.costs`) and of idle time.

    Returns None unless the power of all devices is known.
    """
    busy = idle = device_s = largest_tdp_w = 0.0
    for pool, work in zip(pools, works, strict=True):
        if pool.power is None or work.busy_joules is None:
            return None
        busy += work.busy_joules
        idle_s = max(work.replica_s - work.busy_s, 0.0)
        idle += float(idle_joules(pool.power, idle_s, num_devices=pool.num_devices))
        device_s += pool.num_devices * work.replica_s
        largest_tdp_w = max(largest_tdp_w, pool.power.tdp_w)
    return EnergyUse(busy_joules=busy, idle_joules=idle, device_s=device_s, largest_tdp_w=largest_tdp_w)


def energy_figures(run: EndedRun) -> dict[str, float] | None:
    """Computes the energy of the GPU boards of all replicas, including idle time, in kWh and CO2e.

    None unless the power of all devices is known.
    """
    joules = energy_use(_works(run), run.setting.pools)
    if joules is None:
        return None
    settings, output = run.setting.energy or EnergySettings(), output_of(run)
    total = joules.busy_joules + joules.idle_joules
    return {
        "joules": total,
        "idle_joules": joules.idle_joules,
        "mean_device_w": per(total, joules.device_s),
        "max_device_w": settings.max_power_factor * joules.largest_tdp_w,
        "kwh_per_device_year": float(settings.kwh(per(total, joules.device_s) * SECONDS_PER_YEAR)),
        "joules_per_output_token": per(total, output.output_tokens),
        "joules_per_1000_requests": per(1000 * total, output.requests),
        "kwh": float(settings.kwh(total)),
        "g_co2e": float(settings.g_co2e(total)),
        "kwh_per_1000_requests": per(1000 * float(settings.kwh(total)), output.requests),
        "grid_g_co2e_per_kwh": settings.grid_g_co2e_per_kwh,
        "pue": settings.pue,
    }


def training_use(run: EndedRun) -> dict[str, float] | None:
    """Computes the FLOPs of training, and the number of output tokens of this traffic with the same FLOPs.

    The model is the first pool's. Returns None without `energy.training_tokens`.
    """
    settings = run.setting.energy or EnergySettings()
    if settings.training_tokens is None:
        return None
    flops = training_flops(run.setting.pools[0].model, settings.training_tokens)
    served = sum(work.flops for work in _works(run))
    return {
        "training_tokens": settings.training_tokens,
        "training_flops": flops,
        "output_tokens_of_equal_flops": tokens_to_match_training(flops, served, output_of(run).output_tokens),
    }


def output_of(run: EndedRun) -> Output:
    """Returns the output of the window."""
    figure: OutputFigure = run.figures[OutputFigure.name]
    return figure.output


def _works(run: EndedRun) -> list[Work]:
    work: HardwareUse = run.figures[HardwareUse.name]
    return work.works(run)
