"""Reads columns of JSON lines with pyarrow, some thousand rows at once."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import json as arrow_json

from sim.workload.chunks import ObjectArray, objects
from sim.workload.distributions import IntArray
from sim.workload.trace_files import LINE_FEED, UnusualTextError

OPEN, CLOSE = b"{}"


def columns_of(piece: bytes, schema: pa.Schema) -> dict[str, pa.Array]:
    """Returns the columns of a piece with one object per line, by key; other keys are ignored.

    Raises UnusualTextError unless each line is an object with all keys, whose values have the right type.
    """
    text = np.frombuffer(piece, np.uint8)
    first = np.concatenate([[0], np.flatnonzero(text == LINE_FEED)[:-1] + 1])  # of each line
    # pyarrow also reads two objects in a line, and objects that begin in the line before.
    if not (text[first] == OPEN).all() or ((text[:-1] == CLOSE) & (text[1:] == OPEN)).any():
        raise UnusualTextError
    read = arrow_json.ReadOptions(use_threads=False, block_size=len(piece) + 1)
    parse = arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    try:
        table = arrow_json.read_json(pa.BufferReader(piece), read, parse)
    except pa.ArrowException:
        raise UnusualTextError from None
    columns = {name: table.column(name).combine_chunks() for name in schema.names}
    if table.num_rows != len(first) or any(column.null_count for column in columns.values()):
        raise UnusualTextError
    return columns


def first_object(piece: bytes) -> dict[str, Any]:
    """Returns the object in the first line of a piece. Raises UnusualTextError if there is none."""
    try:
        found = json.loads(piece.partition(b"\n")[0])
    except (ValueError, RecursionError):
        raise UnusualTextError from None
    if not isinstance(found, dict):
        raise UnusualTextError
    return found


def tuples_of(column: pa.ListArray) -> tuple[ObjectArray, IntArray]:
    """Returns lists of whole numbers as tuples [N], and their lengths [N]; a list that is null is empty.

    Raises UnusualTextError for other values in a list.
    """
    try:
        values = column.flatten().cast(pa.int64())
    except (AttributeError, pa.ArrowException):
        raise UnusualTextError from None
    if values.null_count:
        raise UnusualTextError
    lengths = np.asarray(column.value_lengths().fill_null(0).to_numpy(), np.int64)
    numbers = values.to_numpy().tolist()
    ends = np.cumsum(lengths).tolist()
    starts = [0, *ends[:-1]]
    return objects([tuple(numbers[a:b]) for a, b in zip(starts, ends, strict=True)]), lengths
