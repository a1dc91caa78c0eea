"""Puts the summary of a run together from the sums over its tables and the statistics of its latencies.

The sums are those of whole tables (`sim.metrics.summary`) or of parts of them (`sim.metrics.folds`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hwmodels.break_even import break_even_load
from hwmodels.cost import split_cost
from hwmodels.iterations.energy import EnergySettings
from hwmodels.tariff import Tariff
from sim.metrics.adapters import adapter_figures
from sim.metrics.fleet import failure_use, figures_of_pools, retry_figures, scaling_use
from sim.metrics.migrations import migration_figures
from sim.metrics.pressure import cache_figures, preemption_figures, waiting_figures
from sim.metrics.slo import Slo, goodput_figures
from sim.metrics.speculation import speculation_figures
from sim.metrics.sums import Totals, weighted_sum
from sim.metrics.training import training_use
from sim.metrics.transfers import transfer_figures
from sim.metrics.utilisation import (
    EnergyUse,
    PoolHardware,
    Work,
    batch_tokens,
    energy_use,
    hardware_use,
    kv_use_figures,
    prefill_share_of,
    rented_s,
)
from sim.metrics.waste import kv_waste_figures
from sim.metrics.window import Window
from sim.records.run import RunRecords

SECONDS_PER_YEAR = 365 * 24 * 3600.0
STATUSES = ("finished", "rejected", "aborted", "unfinished")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Settings that the figures of a run depend on: see `sim.metrics.summary.summarise`."""

    pools: Sequence[PoolHardware]
    slo: Slo | None = None
    energy: EnergySettings | None = None
    tariff: Tariff | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    """The sums and statistics from which a summary is put together.

    whole: sums over the whole run; inside: over the measured part.
    latencies: the figures of `Measured.figures`. per_user, intervals: sections of the summary.
    transfer_seconds: statistics of KV transfers; None if no KV was transferred.
    kv_internal_s: slot-seconds that were never filled; None: all empty ones.
    works, pipelines: of each pool.
    """

    whole: Totals
    inside: Totals
    latencies: dict[str, Any]
    per_user: dict[str, Any]
    intervals: dict[str, Any]
    transfer_seconds: dict[str, float | int] | None
    knows_waits: bool
    kv_internal_s: float | None
    works: Sequence[Work]
    pipelines: Sequence[dict[str, Any] | None]


def assemble(records: RunRecords, window: Window, sums: Sums, setting: Setting) -> dict[str, Any]:
    """Returns the summary of a run. records: their tables may have no rows."""
    whole, inside, works, pools = sums.whole, sums.inside, sums.works, setting.pools
    output = output_of(inside)
    replica_s = rented_s(records, window)
    joules, energy = energy_use(works, pools), setting.energy or EnergySettings()
    internal_s = inside["kv_empty_s"] if sums.kv_internal_s is None else sums.kv_internal_s
    speculation = records.speculation
    slo, tariff = setting.slo, setting.tariff
    figures = {
        "simulated_s": records.end_s,
        "interrupted": records.interrupted,
        "overload": None if records.overload is None else records.overload._asdict(),
        "missed": None if records.missed is None else records.missed._asdict(),
        "requests": {"arrived": whole["arrived"], **{status: whole[status] for status in STATUSES}},
        **sums.latencies,
        "throughput": {
            "requests_per_s": _per(output.requests, window.duration_s),
            "requests_per_minute": _per(60 * output.requests, window.duration_s),
            "output_tokens_per_s": _per(output.output_tokens, window.duration_s),
            "output_tokens_per_s_and_gpu": _per(
                output.output_tokens, weighted_sum([pool.num_devices for pool in pools], replica_s)
            ),
            "input_tokens_per_s": _per(output.input_tokens, window.duration_s),
        },
        "per_user": sums.per_user,
        "goodput": None if slo is None else goodput_figures(inside, window, slo),
        "intervals": sums.intervals,
        **hardware_use(works),
        "pipeline": sums.pipelines[0] if len(pools) == 1 else None,
        "kv": {
            **kv_use_figures(inside, records.pools, replica_s),
            **kv_waste_figures(inside, internal_s, records.pools, replica_s),
        },
        "iterations": {**_iterations(inside), "discarded_tokens": records.num_discarded_tokens},
        "preemptions": inside["iteration_preempted"],
        "cache": cache_figures(inside, records.num_evicted_blocks),
        "adapters": adapter_figures(whole, records.adapters),
        "preemption": preemption_figures(inside),
        "waiting": waiting_figures(inside, is_known=sums.knows_waits),
        "kv_transfer": None
        if sums.transfer_seconds is None
        else transfer_figures(whole, inside, sums.transfer_seconds, records.links, records.end_s),
        **(
            {}
            if speculation is None
            else speculation_figures(
                inside, speculation.acceptance, int(inside["gap_tokens"]), [p.name for p in records.pools]
            )
        ),
        **({} if records.migrations is None else {"migrations": migration_figures(records)}),
        "cost": _cost(
            weighted_sum([pool.price_usd_per_hour for pool in pools], replica_s) / 3600,
            weighted_sum([pool.num_devices for pool in pools], replica_s) / 3600,
            window.duration_s / 3600,
            output,
            prefill_share_of(inside),
        ),
        "troubles": failure_use(records),
        "retries": retry_figures(whole, records),
        "scaling": scaling_use(records, [pool.num_devices for pool in pools]),
        "by_pool": {}
        if len(records.pools) < 2
        else figures_of_pools(whole, records, replica_s, pools, works, sums.pipelines),
        "bill_usd": None if tariff is None else bill_usd(whole, records.pinned_token_s, tariff),
        "energy": None if joules is None else _energy(joules, energy, output),
        "training": training_use(energy, pools, works, output.output_tokens),
    }
    if figures["bill_usd"] is not None:
        figures["break_even_load"] = break_even_load(figures["cost"]["usd"], figures["bill_usd"])
    figures["publish"] = figures["ttft"]
    return figures


class Output(NamedTuple):
    """Output of the run inside the window."""

    requests: int
    output_tokens: int
    input_tokens: int
    """A whole prompt counts at the time of its first output token, however much was cached or recomputed."""


def add_output(totals: Totals, requests: pd.DataFrame, window: Window) -> None:
    """Adds the requests that finished in the window, and the prompts and first tokens that came there."""
    first_inside = window.holds(_times(requests, "first_token_s"))
    finished_inside = window.holds(_times(requests, "finished_s")) & (
        requests["status"] == "finished"
    ).to_numpy(dtype=np.bool_)
    totals.add("output_requests", finished_inside)
    totals.add("first_tokens_inside", first_tokens(requests, first_inside))
    totals.add("output_prompt_tokens", requests["prompt_tokens"].to_numpy()[first_inside])


def first_tokens(requests: pd.DataFrame, rows: NDArray[np.bool_]) -> NDArray[Any]:
    """Returns the first tokens of the selected requests: one per sample."""
    return requests["samples"].to_numpy()[rows] if "samples" in requests else rows


def output_of(totals: Totals) -> Output:
    """Returns the output of the window: first tokens, ends of gaps, and kept draft tokens."""
    names = ("first_tokens_inside", "gap_tokens", "kept_inside")
    return Output(
        requests=int(totals["output_requests"]),
        output_tokens=sum(int(totals[name]) for name in names),
        input_tokens=int(totals["output_prompt_tokens"]),
    )


def add_iterations(totals: Totals, iterations: pd.DataFrame, inside: NDArray[np.bool_]) -> None:
    """Adds the counts of the iterations in the window. inside: which these are."""
    seqs = (iterations["decode_seqs"].to_numpy() + iterations["prefill_seqs"].to_numpy())[inside]
    totals.add("iterations", inside)
    totals.add("iteration_s", _times(iterations, "duration_s")[inside])
    totals.add("iteration_seqs", seqs)
    totals.raise_to("iteration_seqs", seqs)
    totals.add("iteration_tokens", batch_tokens(iterations)[inside])
    totals.add("iteration_preempted", iterations["preempted"].to_numpy()[inside])


def _iterations(totals: Totals) -> dict[str, float | int]:
    count = totals["iterations"]
    return {
        "count": count,
        "mean_s": _per(totals["iteration_s"], count),
        "mean_batch_seqs": _per(totals["iteration_seqs"], count),
        "max_batch_seqs": totals.largest("iteration_seqs"),
        "mean_batch_tokens": _per(totals["iteration_tokens"], count),
    }


def _cost(
    usd: float, device_hours: float, hours: float, output: Output, prefill_share: float
) -> dict[str, Any]:
    """Computes the cost of all replicas, idle time included, per hour, token and request.

    usd_per_million_output_tokens assigns the whole cost to the output; `split`: `hwmodels.cost.split_cost`.
    """
    split = split_cost(
        usd=usd,
        prefill_time_share=0.0 if math.isnan(prefill_share) else prefill_share,
        num_input_tokens=output.input_tokens,
        num_output_tokens=output.output_tokens,
        num_requests=output.requests,
    )
    return {
        "usd": usd,
        "device_hours": device_hours,
        "usd_per_hour": _per(usd, hours),
        "usd_per_million_output_tokens": _per(usd * 1e6, output.output_tokens),
        "usd_per_1000_requests": split.usd_per_thousand_requests,
        "split": {
            "prefill_time_share": prefill_share,
            "usd_per_million_input_tokens": split.usd_per_million_input_tokens,
            "usd_per_million_output_tokens": split.usd_per_million_output_tokens,
        },
    }


def add_bill(totals: Totals, requests: pd.DataFrame, tariff: Tariff) -> None:
    """Adds the tokens of the bill: served prompts, all output, pinned prefixes."""
    served = requests[requests["first_token_s"].notna()]
    found = served["cached_tokens"].where(served["cached_tokens"] >= tariff.min_cached_tokens, 0)
    totals.add("billed_input", served["prompt_tokens"].to_numpy())
    totals.add("billed_found", found.to_numpy())
    totals.add("billed_written", (served["pinned_tokens"] - found).clip(lower=0).to_numpy())
    totals.add("billed_output", requests["output_tokens"].to_numpy())


def bill_usd(totals: Totals, pinned_token_s: float, tariff: Tariff) -> float:
    """Computes the bill of all clients over the whole run."""
    return tariff.bill_usd(
        input_tokens=float(totals["billed_input"]),
        found=float(totals["billed_found"]),
        written=float(totals["billed_written"]),
        output_tokens=float(totals["billed_output"]),
        pinned_token_s=pinned_token_s,
    )


def _energy(joules: EnergyUse, settings: EnergySettings, output: Output) -> dict[str, float]:
    """Computes the energy of the GPU boards of all replicas, idle time included, and its kWh and CO2e."""
    total = joules.busy_joules + joules.idle_joules
    return {
        "joules": total,
        "idle_joules": joules.idle_joules,
        "mean_device_w": _per(total, joules.device_s),
        "max_device_w": settings.max_power_factor * joules.largest_tdp_w,
        "kwh_per_device_year": float(settings.kwh(_per(total, joules.device_s) * SECONDS_PER_YEAR)),
        "joules_per_output_token": _per(total, output.output_tokens),
        "joules_per_1000_requests": _per(1000 * total, output.requests),
        "kwh": float(settings.kwh(total)),
        "g_co2e": float(settings.g_co2e(total)),
        "kwh_per_1000_requests": _per(1000 * float(settings.kwh(total)), output.requests),
        "grid_g_co2e_per_kwh": settings.grid_g_co2e_per_kwh,
        "pue": settings.pue,
    }


def _times(table: pd.DataFrame, name: str) -> NDArray[np.float64]:
    return table[name].to_numpy(dtype=np.float64)


def _per(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan
