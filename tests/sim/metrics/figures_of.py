"""Single figures of whole tables."""

import pandas as pd

from sim.metrics.definitions import Window
from sim.metrics.features import KvTransferUse
from sim.metrics.figure import EndedRun, FigureSetting, Part
from sim.metrics.fleet import PoolUse, RetryUse
from sim.metrics.hardware_use import Cost, HardwareUse
from sim.metrics.kv_use import CacheUse, KvUse, PreemptionUse, Waiting
from sim.metrics.measured import request_metrics
from sim.records.run import RecordChunk

NOTHING = pd.DataFrame()


def part_of(window, pools=(), pool_records=(), slo=None, **rows):
    """Returns a part with some rows; tables that are not given have no columns."""
    setting = FigureSetting(pools=pools, pool_records=pool_records, slo=slo)
    given = dict.fromkeys(("requests", "iterations", "events"), NOTHING)
    given |= {"gap_s": None, "gap_count": None, "gap_end_s": None, "pool_by_replica": None}
    return Part(setting=setting, window=window, end_s=window.end_s, **given | rows)


def part_of_records(records, window, pools=(), slo=None):
    setting = FigureSetting(pools=pools, pool_records=records.pools, slo=slo)
    table = request_metrics(records.requests, slo)
    return Part.of(setting, window, RecordChunk.of(records), table)


def figure_of(kind, part, records=None, **others):
    """Returns the value of a figure. others: figures that it reads, by name."""
    figure = kind(part.setting)
    figure.add(part)
    figures = {**others, kind.name: figure}
    return figure.value(EndedRun(setting=part.setting, records=records, window=part.window, figures=figures))


def kv_waste(records, window):
    return figure_of(KvUse, part_of_records(records, window), records)


def prefill_time_share(iterations, inside_s):
    part = part_of(Window(0.0, 1.0), iterations=iterations)
    part.__dict__["inside_s"] = inside_s
    cost = Cost(part.setting)
    cost.add(part)
    return cost.prefill_share


def of_events(kind, records, window):
    part = part_of(
        window,
        pool_records=records.pools,
        events=records.events,
        pool_by_replica=records.pool_by_replica,
    )
    return figure_of(kind, part, records)


def cache_use(records, window):
    return of_events(CacheUse, records, window)


def preemption_use(records, window):
    return of_events(PreemptionUse, records, window)


def waiting_use(requests, records):
    part = part_of(Window(0.0, 1.0), requests=requests)
    part.__dict__["measured"] = requests
    return figure_of(Waiting, part, records)


def retry_use(records):
    return figure_of(RetryUse, part_of(Window(0.0, records.end_s), requests=records.requests), records)


def transfer_use(records, measured):
    whole = Window(0.0, records.end_s)
    part = part_of(whole, requests=records.requests, events=records.events)
    part.__dict__["measured"] = measured
    return figure_of(KvTransferUse, part, records)


def pool_figures(records, window, pools):
    part = part_of_records(records, window, pools)
    work = HardwareUse(part.setting)
    work.add(part)
    return figure_of(PoolUse, part, records, **{work.name: work})
