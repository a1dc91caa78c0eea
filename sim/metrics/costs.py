"""Costs of a run: of its replicas, of its clients' bill, of the energy, and of the training of the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hwmodels.costs import (
    EnergySettings,
    break_even_load,
    idle_joules,
    split_cost,
    tokens_to_match_training,
    training_flops,
)
from sim.metrics.definitions import per, times
from sim.metrics.figure import EndedRun, Figure, Part
from sim.metrics.hardware_use import HardwareUse, Work
from sim.metrics.output import Output, OutputFigure
from sim.metrics.sums import weighted_sum
from sim.metrics.utilisation import PoolHardware, batch_tokens
from sim.records.table import column

SECONDS_PER_YEAR = 365 * 24 * 3600.0


class Cost(Figure):
    """Cost of all replicas, idle time included, per hour, token and request.

    usd_per_million_output_tokens assigns the whole cost to the output; `split`: `hwmodels.costs.split_cost`,
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
    """The bill of all clients over the whole run, USD: served prompts, all output, pinned prefixes.

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
    """Returns the load from which on the replicas are cheaper than the bill; nothing without a bill."""
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
    """Computes the energy of the GPU boards of all replicas, idle time included, and its kWh and CO2e.

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
    """Computes the FLOPs of training, and the output tokens of this traffic that take as many.

    The model is that of the first pool. Returns None without `energy.training_tokens`.
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
