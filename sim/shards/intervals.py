"""The iterations and gaps of all shards in the order of simulated time, without all of them in memory.

A shard writes a table as an Arrow file with one record batch for each interval of simulated time (see
`sim.records.timed_rows`), starting at time 0, so the rows of an interval can be read from all shards and
merged, interval by interval.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import BytesIO
from typing import IO, Any, Final

import pyarrow as pa

from sim.records.parquet import arrow_table, of_arrow
from sim.records.run import RecordChunk
from sim.records.table import AnyTable, Table, joined
from sim.records.timed_rows import TimedRows, in_order
from sim.shards.open_files import OpenFiles
from sim.shards.shard_file import ShardMember

MEMBERS: Final = "intervals/"
"""Prefix of a table's name in the file of a shard."""


class _IntervalWriter:
    """Writes a table of a shard that has rows."""

    def __init__(self) -> None:
        self._file = BytesIO()
        self._writer: Any = None
        self._schema: Any = None
        self._num_written = 0

    def add(self, number: int, rows: AnyTable) -> None:
        """Writes the rows of the next interval."""
        assert number >= self._num_written
        table = arrow_table(rows)
        if self._writer is None:
            self._schema = table.schema
            options = pa.ipc.IpcWriteOptions(compression="lz4")
            self._writer = pa.ipc.new_file(self._file, table.schema, options=options)
        for _ in range(number - self._num_written):
            self._write(table.slice(0, 0))
        self._write(table)
        self._num_written = number + 1

    def content(self) -> bytes:
        """Returns the table, which has at least one interval."""
        self._writer.close()
        return self._file.getvalue()

    def _write(self, table: pa.Table) -> None:
        batches = table.combine_chunks().to_batches()
        empty = pa.RecordBatch.from_pylist([], schema=self._schema)
        self._writer.write_batch(batches[0] if batches else empty)


def interval_bytes(chunk: RecordChunk, width_s: float) -> dict[str, bytes]:
    """Returns the tables of a shard that have rows, by member. chunk: all of its records."""
    tables: dict[str, _IntervalWriter] = {}
    for name, number, rows in TimedRows(width_s).add(chunk, is_last=True):
        tables.setdefault(name, _IntervalWriter()).add(number, rows)
    return {MEMBERS + name: table.content() for name, table in tables.items()}


def _reader(shard: int, content: IO[bytes]) -> Any:
    """Returns the table of a shard as a `RecordBatchFileReader`."""
    return pa.ipc.open_file(content)


def merged_intervals(name: str, shards: Sequence[ShardMember]) -> Iterator[Table]:
    """Yields the rows of a table of all shards, interval by interval; an interval has at least one row.

    Only few shard files are open at once.
    """
    with OpenFiles(shards, _reader) as files:
        nothing = [of_arrow(files.opened(index).schema.empty_table()) for index in range(len(shards))]
        sizes = [files.opened(index).num_record_batches for index in range(len(shards))]
        for number in range(max(sizes, default=0)):
            own = [index for index, size in enumerate(sizes) if number < size]
            parts = [of_arrow(pa.table(files.opened(index).get_batch(number))) for index in own]
            parts = [part for part in parts if len(part)]
            if parts:
                yield in_order(name, joined([*nothing, *parts]))
