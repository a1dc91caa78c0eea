"""Conversion of tables to and from Parquet and Arrow: as written by pandas, but without pandas."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from sim.records.table import AnyTable, Table, column


def arrow_table(table: AnyTable) -> pa.Table:
    """Returns an Arrow table; NaN becomes null, as in pandas, and object columns become text."""
    names = [str(name) for name in table]
    return pa.Table.from_arrays([_arrow_column(column(table, name)) for name in names], names=names)


def of_arrow(table: pa.Table) -> Table:
    """Returns the table for an Arrow table made by `arrow_table`."""
    return Table(
        {name: values.to_numpy() for name, values in zip(table.column_names, table.columns, strict=True)}
    )


def parquet_bytes(table: AnyTable, compression: str) -> bytes:
    """Returns a table in the Parquet format."""
    content = BytesIO()
    pq.write_table(arrow_table(table), content, compression=compression)
    return content.getvalue()


def _arrow_column(values: Any) -> Any:
    """Returns a column as an Arrow array over the same memory; `pyarrow.array` would load pandas."""
    kind, validity = values.dtype.kind, None
    if kind == "O":
        texts = [text.encode() for text in values.tolist()]
        ends = np.cumsum([0, *map(len, texts)], dtype=np.int64)
        buffers = [pa.py_buffer(ends), pa.py_buffer(b"".join(texts))]
        return pa.Array.from_buffers(pa.large_string(), len(values), [None, *buffers])
    if kind == "b":
        return pa.Array.from_buffers(pa.bool_(), len(values), [None, _bits(values)])
    if kind == "f" and np.isnan(values).any():
        validity = _bits(~np.isnan(values))
    content = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [validity, content])


def _bits(values: NDArray[np.bool_]) -> Any:
    return pa.py_buffer(np.packbits(values, bitorder="little"))
