"""Shards of a run that is too long to keep its tables: their figures and requests are added up and merged.

A shard returns accumulators of its figures, and the rows of its requests, instead of its tables. The merged
figures are those of one process that streams its records, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from typing import NamedTuple

import numpy as np
import pandas as pd

from sim.metrics.figure import FigureSetting
from sim.metrics.load_series import LoadSeries
from sim.metrics.measured import request_metrics
from sim.metrics.own_latencies import OwnLatencies, taken_columns, with_columns
from sim.metrics.replica_table import ReplicaTable
from sim.metrics.slo import Slo
from sim.metrics.summary import RunFigures
from sim.records.chunk import RecordChunk, without_rows
from sim.records.run import PoolRecord, RunRecords
from sim.records.timed_rows import SORTED_BY
from sim.shards.accumulators import accumulator_bytes, read_accumulator
from sim.shards.intervals import MEMBERS, interval_bytes
from sim.shards.merge import merged
from sim.shards.request_rows import rows_bytes
from sim.shards.shard import ShardRecords
from sim.shards.shard_file import ShardFile, ShardMember, shard_bytes, table_bytes
from sim.shards.traffic import Bounds
from sim.workload.base import WorkloadNotes

FIGURES, ROWS, SERIES, REPLICAS = "figures", "rows", "series", "replicas"
"""Names of the parts of the file of a shard."""
NewSetting = Callable[[Sequence[PoolRecord]], FigureSetting]
"""Makes the setting of figures from the records of the pools."""


class StreamedShards(NamedTuple):
    """The whole run.

    end: its records, with tables without rows. rows: of each shard, the rows of its requests, see
    `sim.shards.request_rows`. intervals: likewise, of the tables of `sim.records.timed_rows` by name.
    """

    figures: RunFigures
    end: RunRecords
    notes: WorkloadNotes
    series: LoadSeries
    replicas: pd.DataFrame
    rows: Sequence[ShardMember]
    intervals: Mapping[str, Sequence[ShardMember]]


class ShardFigures:
    """The accumulators of the figures of a shard. setting: made from the records of its pools."""

    def __init__(self, setting: FigureSetting) -> None:
        self._figures, self._series, self._replicas = RunFigures(setting), LoadSeries(), ReplicaTable()
        self._own = OwnLatencies(setting.new_latencies(), setting.own_terms)

    def add(self, chunk: RecordChunk) -> pd.DataFrame:
        """Adds a part of the records of the shard; returns its rows of requests, see `measured_rows`."""
        chunk = self._own.completed(chunk)
        self._figures.add(chunk)
        table = request_metrics(chunk.requests, self._figures.setting.slo, chunk.own_s)
        self._series.add(table, chunk.iterations)
        self._replicas.add(table, chunk.iterations)
        return with_columns(chunk.requests, chunk.own_s)

    def parts(self, records: RunRecords, bounds: Bounds) -> dict[str, bytes]:
        """Returns the parts of the file of the shard.

        records: see `ReplicaTable.table`. bounds: the replicas of the shard.
        """
        return {
            FIGURES: accumulator_bytes(self._figures),
            SERIES: accumulator_bytes(self._series),
            REPLICAS: table_bytes(self._replicas.table(records).iloc[bounds[0] : bounds[1]]),
        }


def streamed_shard_bytes(
    shard: ShardRecords,
    bounds: Bounds,
    notes: WorkloadNotes,
    new_setting: NewSetting,
    width_s: float | None = None,
) -> bytes:
    """Returns the content of the file of a shard.

    bounds: its replicas. width_s: of the intervals of iterations and gaps; None: these are left out.
    """
    records = shard.records
    figures = ShardFigures(new_setting(records.pools))
    chunk = RecordChunk.of(records, ends=False)
    rows = figures.add(chunk)
    intervals = {} if width_s is None else interval_bytes(chunk, width_s)
    parts = {ROWS: rows_bytes(rows), **intervals, **figures.parts(records, bounds)}
    return shard_bytes(replace(shard, records=without_rows(records)), notes, parts)


def merged_files(
    files: Iterable[ShardFile], new_setting: NewSetting, until_s: float | None
) -> StreamedShards:
    """Merges the shards of all files, by replica. Raises DamagedShardError for the file read last."""
    shards, found, notes = [], None, WorkloadNotes()
    series, tables, rows = LoadSeries(), [], []
    intervals: dict[str, list[ShardMember]] = {}
    for file in files:
        shard, notes = file.records()
        shards.append(shard)
        if found is None:
            found = RunFigures(new_setting(shard.records.pools))
        found.merge(read_accumulator(file.part(FIGURES), RunFigures, found.setting.own))
        series.merge(read_accumulator(file.part(SERIES), LoadSeries))
        tables.append(pd.read_parquet(BytesIO(file.part(REPLICAS))))
        rows.append(file.member(ROWS))
        for name in SORTED_BY:
            if MEMBERS + name in file.names:
                intervals.setdefault(name, []).append(file.member(MEMBERS + name))
    assert found is not None
    end = merged(shards, until_s)
    replicas = pd.concat(tables, ignore_index=True).assign(end_s=end.end_s)
    replicas["busy_share"] = (replicas["busy_s"] / (replicas["end_s"] - replicas["start_s"])).fillna(0.0)
    return StreamedShards(found, end, notes, series, replicas, rows, intervals)


def measured_rows(rows: pd.DataFrame, slo: Slo | None) -> pd.DataFrame:
    """Returns the requests of shards with their `request_metrics`. rows: those of `ShardFigures.add`."""
    requests, own_s = taken_columns(rows)
    if slo is not None and rows.empty:  # of a run without requests
        own_s = {term: np.zeros(0) for term in slo.workload_terms}
    return request_metrics(requests, slo, own_s)
