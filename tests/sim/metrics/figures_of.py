"""Figures of whole tables, section by section of the summary."""

import numpy as np
from sim.metrics.waste import add_kv_waste, kv_waste_figures, never_filled_s

from sim.metrics.definitions import describe
from sim.metrics.fleet import add_requests_by_pool, add_retry_use, figures_of_pools, retry_figures
from sim.metrics.pipeline import pipeline_use_by_pool
from sim.metrics.pressure import (
    add_cache_use,
    add_preemption_use,
    add_waiting_use,
    cache_figures,
    knows_waits,
    preemption_figures,
    waiting_figures,
)
from sim.metrics.sums import TableTotals
from sim.metrics.transfers import add_cached_tokens, add_transfers, transfer_figures, transferred
from sim.metrics.utilisation import add_prefill_time, pool_of_rows, prefill_share_of, rented_s


def kv_waste(records, window, inside_s):
    totals = TableTotals()
    add_kv_waste(totals, records.iterations, inside_s, records.pools, pool_of_rows(records))
    never_s = never_filled_s(records, inside_s)
    internal_s = totals["kv_empty_s"] if never_s is None else never_s
    return kv_waste_figures(totals, internal_s, records.pools, rented_s(records, window))


def prefill_time_share(iterations, inside_s):
    totals = TableTotals()
    add_prefill_time(totals, iterations, inside_s)
    return prefill_share_of(totals)


def cache_use(records, window):
    totals = TableTotals()
    add_cache_use(totals, records.events, window, records.by_replica("kv_bytes_per_token"))
    return cache_figures(totals, records.num_evicted_blocks)


def preemption_use(records, window):
    totals = TableTotals()
    add_preemption_use(totals, records.events, window, records.by_replica("kv_bytes_per_token"))
    return preemption_figures(totals)


def waiting_use(requests):
    totals = TableTotals()
    add_waiting_use(totals, requests)
    return waiting_figures(totals, is_known=knows_waits(requests))


def retry_use(records):
    totals = TableTotals()
    add_retry_use(totals, records.requests)
    return retry_figures(totals, records)


def transfer_use(records, measured):
    totals = TableTotals()
    add_transfers(totals, measured)
    add_cached_tokens(totals, records.events)
    seconds = describe(transferred(measured)["kv_transfer_s"].to_numpy(np.float64))
    return transfer_figures(totals, totals, seconds, records.links, records.end_s)


def pool_figures(records, window, inside_s, pools, works):
    totals = TableTotals()
    add_requests_by_pool(totals, records.requests, records.pool_by_replica, len(pools))
    pipelines = pipeline_use_by_pool(records, inside_s, [pool.model for pool in pools])
    return figures_of_pools(totals, records, rented_s(records, window), pools, works, pipelines)
