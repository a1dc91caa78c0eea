"""Computes the figures of a run from its records: one nested dictionary, written to `summary.json`.

The requests and events that a figure covers:
- TTFT and queue time: every request that reached that point, finished or not; TPOT and E2E: finished
  requests.
- rates: events inside the window (tokens emitted, requests finished).
- shares and latencies: requests that arrived inside the window.
- the whole run, even if the window is shorter: simulated_s, requests (by status), cache.evicted_blocks (pools
  count evictions without their time), adapters, bill_usd (clients pay for the warm-up, too), failures,
  retries and scaling.
- speculation: only if a pool speculates, see `sim.metrics.speculation`.
- pipeline: only if there is one pool; with several pools, by_pool has the pipeline of each.
- publish: time to publish, from arrival to the first token that the user sees. It is the TTFT, unless the
  workload knows of hidden tokens or of clients that wait for the complete answer (`sim.workload.clients`).
- per_user: output tokens/s that one user sees after the first token, 1 / TPOT of each finished request.
- by_priority, by_tenant: the figures of each class, if there is more than one.
- warmup: how the warm-up was determined (warmup_s=auto). intervals: confidence intervals from this run alone,
  see `sim.metrics.one_run`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hwmodels.break_even import break_even_load
from hwmodels.cost import split_cost
from hwmodels.iterations.energy import EnergySettings
from hwmodels.tariff import Tariff
from sim.metrics import definitions
from sim.metrics.adapters import adapter_use
from sim.metrics.fleet import failure_use, pool_figures, retry_use, scaling_use
from sim.metrics.kept_tokens import num_kept_inside
from sim.metrics.measured import Measured, measure
from sim.metrics.one_run import intervals
from sim.metrics.pipeline import pipeline_use
from sim.metrics.pressure import cache_use, preemption_use, waiting_use
from sim.metrics.settings import MetricsSettings
from sim.metrics.slo import Slo, goodput
from sim.metrics.speculation import speculation_use
from sim.metrics.sums import weighted_sum
from sim.metrics.training import training_use
from sim.metrics.transfers import transfer_use
from sim.metrics.utilisation import (
    EnergyUse,
    PoolHardware,
    batch_tokens,
    energy_use,
    hardware_use,
    kv_use,
    prefill_time_share,
    rented_s,
    seconds_inside,
    work_by_pool,
)
from sim.metrics.waste import kv_waste
from sim.metrics.window import Window
from sim.records.run import RunRecords

SECONDS_PER_YEAR = 365 * 24 * 3600.0

STATUSES = ("finished", "rejected", "aborted", "unfinished")


def summarise(
    records: RunRecords,
    *,
    pools: Sequence[PoolHardware],
    slo: Slo | None,
    energy: EnergySettings | None = None,
    tariff: Tariff | None = None,
    metrics: MetricsSettings = MetricsSettings(),
    part: Measured | None = None,
) -> dict[str, Any]:
    """Computes all figures of a run as plain JSON: seconds, shares from 0 to 1, None for a missing figure.

    pools: hardware of the pools, in the order of the records. part: the result of `measure`, if it is known.
    Without an SLO there is no goodput, without a power model of the device no energy.
    Raises AssertionError if the records are inconsistent (`check_conservation`).
    """
    counts = check_conservation(records)
    part = part or measure(records, metrics, slo)
    window, measured = part.window, part.requests
    inside_s = seconds_inside(records.iterations, window)
    output = _output(records, window, int(part.gaps_inside.sum()) + num_kept_inside(records, window))
    works = work_by_pool(records, window, inside_s, pools)
    joules, replica_s = energy_use(works, pools), rented_s(records, window)
    figures = {
        "simulated_s": records.end_s,
        "interrupted": records.interrupted,
        "overload": None if records.overload is None else records.overload._asdict(),
        "missed": None if records.missed is None else records.missed._asdict(),
        "requests": counts,
        **part.figures(records, slo),
        "throughput": {
            "requests_per_s": _per(output.requests, window.duration_s),
            "requests_per_minute": _per(60 * output.requests, window.duration_s),
            "output_tokens_per_s": _per(output.output_tokens, window.duration_s),
            "input_tokens_per_s": _per(output.input_tokens, window.duration_s),
        },
        "per_user": definitions.describe_speed(_times(measured, "tpot_s")),
        "goodput": None if slo is None else goodput(part.table, measured, window, slo),
        "intervals": intervals(records, part.table, measured, window),
        **hardware_use(works),
        "pipeline": pipeline_use(records.iterations, inside_s, pools[0].model) if len(pools) == 1 else None,
        "kv": {**kv_use(records, window, inside_s), **kv_waste(records, window, inside_s)},
        "iterations": {
            **_iterations(records.iterations, inside_s > 0),
            "discarded_tokens": records.num_discarded_tokens,
        },
        "preemptions": int(records.iterations["preempted"].to_numpy()[inside_s > 0].sum()),
        "cache": cache_use(records, window),
        "adapters": adapter_use(records),
        "preemption": preemption_use(records, window),
        "waiting": waiting_use(measured),
        "kv_transfer": transfer_use(records, measured),
        **speculation_use(records, part, [pool.model for pool in pools]),
        "cost": _cost(
            weighted_sum([pool.price_usd_per_hour for pool in pools], replica_s) / 3600,
            weighted_sum([pool.num_devices for pool in pools], replica_s) / 3600,
            window.duration_s / 3600,
            output,
            prefill_time_share(records.iterations, inside_s),
        ),
        "troubles": failure_use(records),
        "retries": retry_use(records),
        "scaling": scaling_use(records, [pool.num_devices for pool in pools]),
        "by_pool": pool_figures(records, window, inside_s, pools, works),
        "bill_usd": None if tariff is None else _bill_usd(part.table, records, tariff),
        "energy": None if joules is None else _energy(joules, energy or EnergySettings(), output),
        "training": training_use(energy or EnergySettings(), pools, works, output.output_tokens),
    }
    if figures["bill_usd"] is not None:
        figures["break_even_load"] = break_even_load(figures["cost"]["usd"], figures["bill_usd"])
    figures["publish"] = figures["ttft"]
    plain: dict[str, Any] = plain_json(figures)
    return plain


def check_conservation(records: RunRecords) -> dict[str, int]:
    """Counts the requests by status; raises AssertionError if the records are inconsistent.

    Checks that arrived = finished + rejected + aborted + unfinished, that every output token, including those
    lost in a crash, is the first token of a request (or sample), ends a gap, or is a kept draft token, and
    that the times of a request are in order.
    """
    requests = records.requests
    counts = {status: int((requests["status"] == status).sum()) for status in STATUSES}
    assert sum(counts.values()) == len(requests), f"{len(requests)} requests arrived, but by status: {counts}"
    assert requests["request_id"].is_unique, "two rows for one request"
    first_tokens = _first_tokens(requests, requests["first_token_s"].notna().to_numpy())
    first_tokens += records.num_lost_first_tokens
    emitted, seen = int(requests["output_tokens"].sum()), first_tokens + int(records.gap_count.sum())
    if "lost_tokens" in requests:
        emitted += int(requests["lost_tokens"].sum())
    if "kept_tokens" in records.iterations:
        seen += int(records.iterations["kept_tokens"].sum())
    assert emitted == seen, (
        f"{emitted} output tokens, but {first_tokens} first tokens + gaps + kept draft tokens = {seen}"
    )
    moments = [f"{name}_s" for name in ("arrival", "scheduled", "first_token", "last_token", "finished")]
    for earlier, later in pairwise(moments):
        early = requests.index[_times(requests, earlier) > _times(requests, later)]
        assert early.empty, f"row {early[0]}: {later} is before {earlier}"
    return {"arrived": len(requests), **counts}


class _Output(NamedTuple):
    """Output of the run inside the window."""

    requests: int
    output_tokens: int
    input_tokens: int
    """A whole prompt counts at the time of its first output token, however much was cached or recomputed."""


def _output(records: RunRecords, window: Window, num_later_tokens: int) -> _Output:
    """Counts the output of the window.

    num_later_tokens: output tokens inside the window that are not the first of their request.
    """
    first_inside = window.holds(_times(records.requests, "first_token_s"))
    finished_inside = window.holds(_times(records.requests, "finished_s")) & (
        records.requests["status"] == "finished"
    ).to_numpy(dtype=np.bool_)
    return _Output(
        requests=int(finished_inside.sum()),
        output_tokens=_first_tokens(records.requests, first_inside) + num_later_tokens,
        input_tokens=int(records.requests["prompt_tokens"].to_numpy()[first_inside].sum()),
    )


def _first_tokens(requests: pd.DataFrame, rows: NDArray[np.bool_]) -> int:
    """Counts the first tokens of the selected requests: one per sample."""
    return int(requests["samples"].to_numpy()[rows].sum()) if "samples" in requests else int(rows.sum())


def _iterations(iterations: pd.DataFrame, inside: NDArray[np.bool_]) -> dict[str, float | int]:
    count = int(inside.sum())
    seqs = iterations["decode_seqs"].to_numpy() + iterations["prefill_seqs"].to_numpy()
    return {
        "count": count,
        "mean_s": _per(float(_times(iterations, "duration_s")[inside].sum()), count),
        "mean_batch_seqs": _per(int(seqs[inside].sum()), count),
        "max_batch_seqs": int(seqs[inside].max()) if count else 0,
        "mean_batch_tokens": _per(int(batch_tokens(iterations)[inside].sum()), count),
    }


def _cost(
    usd: float, device_hours: float, hours: float, output: _Output, prefill_share: float
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


def _bill_usd(requests: pd.DataFrame, records: RunRecords, tariff: Tariff) -> float:
    """Computes the bill of all clients over the whole run: served prompts, all output, pinned prefixes."""
    served = requests[requests["first_token_s"].notna()]
    found = served["cached_tokens"].where(served["cached_tokens"] >= tariff.min_cached_tokens, 0)
    return tariff.bill_usd(
        input_tokens=float(served["prompt_tokens"].sum()),
        found=float(found.sum()),
        written=float((served["pinned_tokens"] - found).clip(lower=0).sum()),
        output_tokens=float(requests["output_tokens"].sum()),
        pinned_token_s=records.pinned_token_s,
    )


def _energy(joules: EnergyUse, settings: EnergySettings, output: _Output) -> dict[str, float]:
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


def plain_json(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {key: plain_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
