"""The requests of all shards in the order of their ids, without all of them in memory.

A shard has requests from the whole run. Its table is written in row groups of neighbouring ids, so the rows
of a range of ids can be read from all shards and merged, range by range.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import BytesIO
from itertools import pairwise
from typing import IO, Any, Final

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from sim.records.parquet import arrow_table, of_arrow
from sim.records.run import GROUP_ROWS
from sim.records.table import AnyTable, Table, column, joined
from sim.shards.open_files import OpenFiles
from sim.shards.shard_file import ShardMember

GROUPS_AT_ONCE: Final = 8
"""Number of groups (see `sim.records.run`) whose requests are merged at once: half a million rows, 200 MB."""
ID: Final = "request_id"


def rows_bytes(requests: AnyTable, group_rows: int = GROUP_ROWS) -> bytes:
    """Returns a table in the Parquet format, with a row group for each range of `GROUPS_AT_ONCE` groups.

    requests: those of a shard, by request id.
    """
    content = BytesIO()
    table = arrow_table(requests)
    with pq.ParquetWriter(content, table.schema, compression="lz4") as writer:
        for first, end in _runs(column(requests, ID) // (group_rows * GROUPS_AT_ONCE)):
            writer.write_table(table.slice(first, end - first), row_group_size=max(1, end - first))
    return content.getvalue()


def _runs(values: NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Yields the row range (first, end) of each value in sorted values; for no values, the empty range."""
    return pairwise([0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)])


def merged_groups(shards: Sequence[ShardMember], group_rows: int = GROUP_ROWS) -> Iterator[Table]:
    """Yields the requests of all shards, group by group, by request id; a group has at least one row.

    shards: the result of `rows_bytes` for each. Only few of their files are open at once.
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
                    places.setdefault(first_id // (group_rows * GROUPS_AT_ONCE), []).append((shard, index))
        for _, own in sorted(places.items()):
            parts = [tables.opened(shard).read_row_group(index) for shard, index in own]
            rows = joined([of_arrow(part) for part in parts])
            rows = rows.take(np.argsort(rows[ID]))
            for first, end in _runs(rows[ID] // group_rows):
                yield rows[first:end]


def _tables(shards: Sequence[ShardMember]) -> OpenFiles[Any]:
    """Returns the tables of shards as `ParquetFile`s."""
    metadata: dict[int, Any] = {}  # of all, as it is slow to read

    def read(shard: int, content: IO[bytes]) -> Any:
        file = pq.ParquetFile(content, metadata=metadata.get(shard))
        metadata[shard] = file.metadata
        return file

    return OpenFiles(shards, read)
