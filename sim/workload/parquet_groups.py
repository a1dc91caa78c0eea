"""Metadata of a Parquet trace: which row groups lie before a window of time, and how long lists are."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sim.workload.unix_times import ArrivalClock


class Start(NamedTuple):
    """The row group with which reading begins, and the number of its first row, from 1."""

    group: int
    row: int


def start_of(file: pq.ParquetFile, column: str, clock: ArrivalClock, start_s: float) -> Start:
    """Returns the first row group of which the times may reach start_s.

    column: name of the times, which are in order. A group without statistics of its times ends the search,
    and the last group is read in any case. The clock reads the first time of the file.
    """
    first = (
        next(file.iter_batches(1, row_groups=[0], columns=[column]), None) if file.num_row_groups else None
    )
    if first is None or not clock.begins(str(with_plain_times(first, column).column(0)[0].as_py())):
        return Start(0, 1)
    row = 1
    for group in range(file.num_row_groups - 1):
        latest_s = _latest_s(file, group, column, clock)
        if latest_s is None or latest_s >= start_s:
            return Start(group, row)
        row += file.metadata.row_group(group).num_rows
    return Start(file.num_row_groups - 1, row)


def longest_lists(file: pq.ParquetFile, columns: Collection[str]) -> float:
    """Returns the mean length of a row's lists in the row group where it is largest; 0 without lists."""

    def values_per_row(group: int) -> float:
        metadata = file.metadata.row_group(group)
        found = [metadata.column(i) for i in range(metadata.num_columns)]
        names = (column.path_in_schema.partition(".") for column in found)
        lists = (one for one, (name, dot, _) in zip(found, names, strict=True) if dot and name in columns)
        return float(sum(one.num_values for one in lists) / max(metadata.num_rows, 1))

    return max(map(values_per_row, range(file.num_row_groups)), default=0.0)


def with_plain_times(batch: pa.RecordBatch, name: str) -> pa.RecordBatch:
    """Returns the batch with a column of dates as Unix times in nanoseconds."""
    index = batch.schema.get_field_index(name)
    return batch.set_column(index, name, plain_times(batch.column(index)))


def plain_times(column: pa.Array) -> pa.Array:
    """Returns dates as Unix times in nanoseconds, and other values as they are."""
    if not pa.types.is_timestamp(column.type):
        return column
    return column.cast(pa.timestamp("ns", column.type.tz)).cast(pa.int64())


def _latest_s(file: pq.ParquetFile, group: int, name: str, clock: ArrivalClock) -> float | None:
    """Returns the latest time in a row group, in seconds; None if its statistics do not tell."""
    metadata = file.metadata.row_group(group)
    columns = (metadata.column(i) for i in range(metadata.num_columns))
    found = next((column.statistics for column in columns if column.path_in_schema == name), None)
    if found is None or not found.has_min_max:
        return None
    latest: Any = found.max
    kind = file.schema_arrow.field(name).type
    if not pa.types.is_timestamp(kind) and type(latest) not in (int, float):
        return None
    numbers = plain_times(pa.array([latest], kind)).to_numpy()
    times_s = clock.of_numbers(numbers if numbers.dtype == np.int64 else numbers.astype(np.float64))
    return None if times_s is None else float(times_s[0])
