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

WINDOW_GROUPS: Final = 8
"""Groups (see `sim.records.chunk`) whose requests are merged at once: half a million rows, 200 MB."""
ID: Final = "request_id"


def windowed_bytes(requests: pd.DataFrame, group_rows: int = GROUP_ROWS) -> bytes:
    """Returns the table of a shard's requests in the Parquet format, with a row group for each window.

    requests: by request id.
    """
    table = pa.Table.from_pandas(requests, preserve_index=False)
    window = requests[ID].to_numpy() // (group_rows * WINDOW_GROUPS)
    borders = [0, *(np.flatnonzero(np.diff(window)) + 1).tolist(), len(window)]
    content = BytesIO()
    with pq.ParquetWriter(content, table.schema, compression="lz4") as writer:
        for first, end in pairwise(borders):
            writer.write_table(table.slice(first, end - first), row_group_size=max(1, end - first))
    return content.getvalue()


def merged_groups(shards: Sequence[IO[bytes]], group_rows: int = GROUP_ROWS) -> Iterator[pd.DataFrame]:
    """Yields the requests of all shards, group after group, by request id; a group has at least one row.

    shards: files with what `windowed_bytes` returns.
    """
    files = [pq.ParquetFile(shard) for shard in shards]
    places: dict[int, list[tuple[Any, int]]] = {}
    for file in files:
        column = file.schema_arrow.get_field_index(ID)
        for index in range(file.num_row_groups):
            group = file.metadata.row_group(index)
            if group.num_rows:
                first_id = group.column(column).statistics.min
                places.setdefault(first_id // (group_rows * WINDOW_GROUPS), []).append((file, index))
    for _, own in sorted(places.items()):
        parts = [file.read_row_group(index).to_pandas() for file, index in own]
        rows = pd.concat(parts, ignore_index=True).sort_values(ID, ignore_index=True)
        group_of = rows[ID].to_numpy() // group_rows
        borders = [0, *(np.flatnonzero(np.diff(group_of)) + 1).tolist(), len(rows)]
        for first, end in pairwise(borders):
            yield rows[first:end].reset_index(drop=True)
