"""The requests of all shards in the order of their ids, without all of them in memory.

A shard has requests from the whole run. Its table is written in row groups of ids that are close together,
so that the rows of a range of ids can be read from all shards, and merged, range after range.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import BytesIO
from itertools import pairwise
from typing import IO, Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from sim.records.chunk import GROUP_ROWS
from sim.shards.open_files import OpenFiles
from sim.shards.shard_file import ShardMember

WINDOW_GROUPS: Final = 8
"""Groups (see `sim.records.chunk`) whose requests are merged at once: half a million rows, 200 MB."""
ID: Final = "request_id"


class WindowWriter:
    """Writes the table of the requests of a shard in the Parquet format, with a row group for each window.

    file: is closed by the caller. A window whose requests come in several pieces has several row groups.
    """

    def __init__(self, file: IO[bytes], group_rows: int = GROUP_ROWS) -> None:
        self._file, self._group_rows = file, group_rows
        self._writer: pq.ParquetWriter | None = None
        self._empty: pa.Table | None = None

    def add(self, requests: pd.DataFrame) -> None:
        """Writes rows, by request id; the ids of later calls are greater."""
        if requests.empty:  # its texts have no type
            self._empty = self._empty or pa.Table.from_pandas(requests, preserve_index=False)
            return
        schema = None if self._writer is None else self._writer.schema
        table = pa.Table.from_pandas(requests, schema, preserve_index=False)
        window = requests[ID].to_numpy() // (self._group_rows * WINDOW_GROUPS)
        borders = [0, *(np.flatnonzero(np.diff(window)) + 1).tolist(), len(window)]
        for first, end in pairwise(borders):
            self._write(table.slice(first, end - first))

    def close(self) -> None:
        """Writes the end of the table; without rows, it has the columns of the rows that were added."""
        if self._writer is None and self._empty is not None:
            self._write(self._empty)
        if self._writer is not None:
            self._writer.close()

    def _write(self, table: pa.Table) -> None:
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._file, table.schema, compression="lz4")
        self._writer.write_table(table, row_group_size=max(1, len(table)))


def windowed_bytes(requests: pd.DataFrame, group_rows: int = GROUP_ROWS) -> bytes:
    """Returns what a `WindowWriter` writes. requests: those of a shard, by request id."""
    content = BytesIO()
    writer = WindowWriter(content, group_rows)
    writer.add(requests)
    writer.close()
    return content.getvalue()


def merged_groups(shards: Sequence[ShardMember], group_rows: int = GROUP_ROWS) -> Iterator[pd.DataFrame]:
    """Yields the requests of all shards, group after group, by request id; a group has at least one row.

    shards: what `windowed_bytes` returns for each. Few of their files are open at once.
    """
    with _tables(shards) as tables:
        places: dict[int, list[tuple[int, int]]] = {}
        for shard in range(len(shards)):
            metadata = tables.opened(shard).metadata
            column = tables.opened(shard).schema_arrow.get_field_index(ID)
            for index in range(metadata.num_row_groups):
                group = metadata.row_group(index)
                if group.num_rows:
                    first_id = group.column(column).statistics.min
                    places.setdefault(first_id // (group_rows * WINDOW_GROUPS), []).append((shard, index))
        for _, own in sorted(places.items()):
            parts = [tables.opened(shard).read_row_group(index).to_pandas() for shard, index in own]
            rows = pd.concat(parts, ignore_index=True).sort_values(ID, ignore_index=True)
            group_of = rows[ID].to_numpy() // group_rows
            borders = [0, *(np.flatnonzero(np.diff(group_of)) + 1).tolist(), len(rows)]
            for first, end in pairwise(borders):
                yield rows[first:end].reset_index(drop=True)


def _tables(shards: Sequence[ShardMember]) -> OpenFiles[Any]:
    """Returns the tables of shards as `ParquetFile`s."""
    metadata: dict[int, Any] = {}  # of all, as it is slow to read

    def read(shard: int, content: IO[bytes]) -> Any:
        file = pq.ParquetFile(content, metadata=metadata.get(shard))
        metadata[shard] = file.metadata
        return file

    return OpenFiles(shards, read)
