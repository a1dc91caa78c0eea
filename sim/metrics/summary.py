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
- throughput.output_tokens_per_s_and_gpu: output tokens over the GPU-seconds that were rented.
- per_user: output tokens/s that one user sees after the first token, 1 / TPOT of each finished request.
- by_priority, by_tenant: the figures of each class, if there is more than one.
- warmup: how the warm-up was determined (warmup_s=auto). intervals: confidence intervals from this run alone,
  see `sim.metrics.one_run`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hwmodels.iterations.energy import EnergySettings
from hwmodels.tariff import Tariff
from sim.metrics import definitions
from sim.metrics.adapters import add_adapter_use
from sim.metrics.assembly import (
    STATUSES,
    Setting,
    Sums,
    add_bill,
    add_iterations,
    add_output,
    assemble,
    first_tokens,
)
from sim.metrics.by_class import COUNTS, add_status_counts
from sim.metrics.fleet import add_requests_by_pool, add_retry_use
from sim.metrics.kept_tokens import iteration_ends_s, kept_over_time
from sim.metrics.measured import Measured, measure
from sim.metrics.one_run import intervals
from sim.metrics.pipeline import pipeline_use_by_pool
from sim.metrics.pressure import add_cache_use, add_preemption_use, add_waiting_use, knows_waits
from sim.metrics.settings import MetricsSettings
from sim.metrics.slo import Slo, add_goodput
from sim.metrics.speculation import add_draft_counts, add_flops_by_pool
from sim.metrics.sums import TableTotals, Totals
from sim.metrics.transfers import add_cached_tokens, add_transfers, transferred
from sim.metrics.utilisation import (
    PoolHardware,
    add_kv_use,
    add_prefill_time,
    pool_of_rows,
    seconds_inside,
    work_by_pool,
)
from sim.metrics.waste import add_kv_waste, never_filled_s
from sim.metrics.window import Window
from sim.records.run import RunRecords


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
    check_conservation(records)
    part = part or measure(records, metrics, slo)
    inside_s = seconds_inside(records.iterations, part.window)
    whole, inside = TableTotals(), TableTotals()
    add_whole_requests(whole, part.table, tariff)
    add_requests_by_pool(whole, part.table, records.pool_by_replica, len(pools))
    add_adapter_use(whole, records.iterations)
    add_cached_tokens(whole, records.events)
    add_measured_requests(inside, part.table, part.requests, part.window, slo)
    inside.add("gap_tokens", part.gaps_inside)
    for add in (add_cache_use, add_preemption_use):
        add(inside, records.events, part.window, records.by_replica("kv_bytes_per_token"))
    add_iterations(inside, records.iterations, inside_s > 0)
    add_prefill_time(inside, records.iterations, inside_s)
    for add_kv in (add_kv_use, add_kv_waste):
        add_kv(inside, records.iterations, inside_s, records.pools, pool_of_rows(records))
    kept_s, kept = kept_over_time(records)
    inside.add("kept_inside", kept[part.window.holds(kept_s)])
    if records.speculation is not None:
        is_inside = part.window.holds(iteration_ends_s(records))
        add_draft_counts(inside, records.iterations[is_inside])
        add_flops_by_pool(inside, records, is_inside, [pool.model for pool in pools])
    figures = assemble(
        records,
        part.window,
        Sums(
            whole=whole,
            inside=inside,
            latencies=part.figures(records, slo),
            per_user=definitions.describe_speed(_times(part.requests, "tpot_s")),
            intervals=intervals(records, part.table, part.requests, part.window),
            transfer_seconds=_transfer_seconds(part),
            knows_waits=knows_waits(part.table),
            kv_internal_s=never_filled_s(records, inside_s),
            works=work_by_pool(records, part.window, inside_s, pools),
            pipelines=pipeline_use_by_pool(records, inside_s, [pool.model for pool in pools]),
        ),
        Setting(pools=pools, slo=slo, energy=energy, tariff=tariff),
    )
    plain: dict[str, Any] = plain_json(figures)
    return plain


def add_whole_requests(totals: Totals, requests: pd.DataFrame, tariff: Tariff | None) -> None:
    """Adds the counts of requests that cover the whole run."""
    add_status_counts(totals, requests)
    add_retry_use(totals, requests)
    if tariff is not None:
        add_bill(totals, requests, tariff)


def add_measured_requests(
    totals: Totals, table: pd.DataFrame, measured: pd.DataFrame, window: Window, slo: Slo | None
) -> None:
    """Adds the sums over requests that cover the measured part of the run.

    table: `request_metrics`; measured: its rows that arrived in the window.
    """
    add_output(totals, table, window)
    add_waiting_use(totals, measured)
    add_transfers(totals, measured)
    if slo is not None:
        add_goodput(totals, table, measured, window, slo)


def _transfer_seconds(part: Measured) -> dict[str, float | int] | None:
    """Returns the statistics of the KV transfers of measured requests; None if the run had none."""
    if not len(transferred(part.table)):
        return None
    return definitions.describe(_times(transferred(part.requests), "kv_transfer_s"))


def check_conservation(records: RunRecords) -> dict[str, int]:
    """Counts the requests by status; raises AssertionError if the records are inconsistent.

    Checks that arrived = finished + rejected + aborted + unfinished, that every output token, including those
    lost in a crash, is the first token of a request (or sample), ends a gap, or is a kept draft token, and
    that the times of a request are in order.
    """
    totals = TableTotals()
    add_status_counts(totals, records.requests)
    add_token_counts(totals, records.requests)
    totals.add("gap_count", records.gap_count)
    add_kept_tokens(totals, records.iterations)
    check_rows(records.requests)
    return checked_counts(totals, records.num_lost_first_tokens)


def add_token_counts(totals: Totals, requests: pd.DataFrame) -> None:
    """Adds the output tokens of requests, with lost ones, and their first tokens."""
    has_begun = requests["first_token_s"].notna().to_numpy()
    totals.add("emitted_first_tokens", first_tokens(requests, has_begun))
    totals.add("emitted_tokens", requests["output_tokens"].to_numpy())
    if "lost_tokens" in requests:
        totals.add("emitted_tokens", requests["lost_tokens"].to_numpy())
    totals.add("rows_of_requests", np.ones(len(requests), np.bool_))


def add_kept_tokens(totals: Totals, iterations: pd.DataFrame) -> None:
    """Adds the kept draft tokens of iterations, if they have any."""
    if "kept_tokens" in iterations:
        totals.add("kept_draft_tokens", iterations["kept_tokens"].to_numpy())


def checked_counts(totals: Totals, num_lost_first_tokens: int) -> dict[str, int]:
    """Returns the requests by status; raises AssertionError if requests or tokens are missing."""
    counts = {name: int(totals[name]) for name in COUNTS}
    num_rows = int(totals["rows_of_requests"])
    by_status = {status: counts[status] for status in STATUSES}
    assert sum(by_status.values()) == num_rows, f"{num_rows} requests arrived, but by status: {by_status}"
    first = int(totals["emitted_first_tokens"]) + num_lost_first_tokens
    emitted = int(totals["emitted_tokens"])
    seen = first + int(totals["gap_count"]) + int(totals["kept_draft_tokens"])
    assert emitted == seen, (
        f"{emitted} output tokens, but {first} first tokens + gaps + kept draft tokens = {seen}"
    )
    return counts


def check_rows(requests: pd.DataFrame) -> None:
    """Raises AssertionError if a request has two rows, or its times are not in order."""
    assert requests["request_id"].is_unique, "two rows for one request"
    moments = [f"{name}_s" for name in ("arrival", "scheduled", "first_token", "last_token", "finished")]
    for earlier, later in pairwise(moments):
        early = requests.index[_times(requests, earlier) > _times(requests, later)]
        assert early.empty, f"row {early[0]}: {later} is before {earlier}"


def _times(table: pd.DataFrame, name: str) -> NDArray[np.float64]:
    return table[name].to_numpy(dtype=np.float64)


def plain_json(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {key: plain_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
