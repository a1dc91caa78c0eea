"""Shards of a streaming run: their metrics and requests are accumulated and merged.

A shard returns its accumulators and the rows of its requests instead of its tables. The merged metrics are
bit-identical to those of one process that streams its records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from sim.metrics.figure import FigureSetting
from sim.metrics.result import RunSums
from sim.records.run import PoolRecord, RecordChunk, RunRecords, without_rows
from sim.records.timed_rows import SORTED_BY
from sim.shards.accumulators import accumulator_bytes, read_accumulator
from sim.shards.intervals import MEMBERS, interval_bytes
from sim.shards.merge import merged
from sim.shards.request_rows import rows_bytes
from sim.shards.shard import ShardRecords
from sim.shards.shard_file import ShardFile, ShardMember, shard_bytes
from sim.workload.base import WorkloadNotes

SUMS, ROWS = "sums", "rows"
"""Names of the parts of the file of a shard."""
NewSetting = Callable[[Sequence[PoolRecord]], FigureSetting]
"""Creates the setting of metrics from the records of the pools."""


class MergedSums(NamedTuple):
    """The whole run. end: its records, with empty tables.

    rows: the request rows of each shard, see `sim.shards.request_rows`. intervals: the rows of the tables of
    `sim.records.timed_rows`, by name and shard.
    """

    sums: RunSums
    end: RunRecords
    notes: WorkloadNotes
    rows: Sequence[ShardMember]
    intervals: Mapping[str, Sequence[ShardMember]]


def sums_bytes(
    shard: ShardRecords, notes: WorkloadNotes, new_setting: NewSetting, width_s: float | None = None
) -> bytes:
    """Returns the content of the file of a shard.

    notes: the notes on the traffic of the whole run. width_s: width of the intervals of iterations and gaps;
    None: these are omitted.
    """
    records = shard.records
    sums = RunSums(new_setting(records.pools))
    chunk = sums.add(RecordChunk.of(records, ends=False))
    intervals = {} if width_s is None else interval_bytes(chunk, width_s)
    parts = {ROWS: rows_bytes(chunk.requests), SUMS: accumulator_bytes(sums), **intervals}
    return shard_bytes(replace(shard, records=without_rows(records)), notes, parts)


def merged_sums(files: Iterable[ShardFile], new_setting: NewSetting, until_s: float | None) -> MergedSums:
    """Merges the shards of all files, by replica. Raises DamagedShardError for the file read last."""
    shards, found, notes, rows = [], None, WorkloadNotes(), []
    intervals: dict[str, list[ShardMember]] = {}
    for file in files:
        shard, notes = file.records()
        shards.append(shard)
        if found is None:
            found = RunSums(new_setting(shard.records.pools))
        found.merge(read_accumulator(file.part(SUMS), RunSums, found.figures.setting.own))
        rows.append(file.member(ROWS))
        for name in SORTED_BY:
            if MEMBERS + name in file.names:
                intervals.setdefault(name, []).append(file.member(MEMBERS + name))
    assert found is not None
    return MergedSums(found, merged(shards, until_s), notes, rows, intervals)
