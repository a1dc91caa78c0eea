"""Rows of a Parquet trace, some at a time, without the row groups that lie before a window of time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sim.workload.trace_blocks import MAX_VALUES
from sim.workload.unix_times import ArrivalClock

LISTS_AT_ONCE = 256
"""Rows with lists that are read at once."""


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


def batches_of(
    file: pq.ParquetFile, columns: Sequence[str], max_rows: int, first: int = 0
) -> Iterator[pa.RecordBatch]:
    """Yields max_rows rows at a time, fewer if their lists have more than `MAX_VALUES` numbers.

    first: the row group with which reading begins. Lists may be long in one part of a file only.
    """
    groups = range(first, file.num_row_groups)
    types = [file.schema_arrow.field(name).type for name in columns]
    if not any(map(pa.types.is_nested, types)):
        yield from file.iter_batches(max_rows, groups, columns, use_threads=False)
        return
    gathered: list[pa.RecordBatch] = []
    num_rows = num_bytes = 0
    for batch in file.iter_batches(min(LISTS_AT_ONCE, max_rows), groups, columns, use_threads=False):
        while len(batch):
            part = batch.slice(0, max_rows - num_rows)
            batch = batch.slice(len(part))
            gathered.append(part)
            num_rows, num_bytes = num_rows + len(part), num_bytes + part.nbytes
            if num_rows == max_rows or num_bytes > 8 * MAX_VALUES:
                yield _joined(gathered)
                gathered, num_rows, num_bytes = [], 0, 0
    if gathered:
        yield _joined(gathered)


def _joined(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


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
    paths = [file.schema.column(i).path for i in range(len(file.schema))]
    if name not in paths:
        return None
    # pyarrow ends the process for some damaged metadata, unless it has found the damage while it reads rows.
    next(file.iter_batches(1, row_groups=[group], columns=[name]), None)
    found = file.metadata.row_group(group).column(paths.index(name)).statistics
    if found is None or not found.has_min_max:
        return None
    latest: Any = found.max
    kind = file.schema_arrow.field(name).type
    if not pa.types.is_timestamp(kind) and type(latest) not in (int, float):
        return None
    numbers = plain_times(pa.array([latest], kind)).to_numpy()
    times_s = clock.of_numbers(numbers if numbers.dtype == np.int64 else numbers.astype(np.float64))
    return None if times_s is None else float(times_s[0])
