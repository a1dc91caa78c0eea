"""Reads columns of CSV text with pyarrow, some ten thousand rows at once.

Only plain text is read: no quotes, as many fields in each row as in the header, whole numbers without
separators. Everything else raises UnusualTextError.
"""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa
from pyarrow import csv

from sim.workload.distributions import IntArray
from sim.workload.trace_files import UnusualTextError


class CsvTexts(NamedTuple):
    """Columns of the rows of a piece, each [N]."""

    arrival: pa.Array
    """Texts."""
    prompt: IntArray
    output: IntArray


class CsvPieces:
    """Reads pieces of a file with a header."""

    def __init__(self, header: list[str], positions: list[int]) -> None:
        """Prepares the reading. positions: those of the arrivals, prompts and outputs in the header."""
        self.header = header
        numbers = [str(i) for i in range(len(header))]  # other columns may have equal names
        self._names = [numbers[i] for i in positions]
        types = dict(zip(self._names, (pa.utf8(), pa.int64(), pa.int64()), strict=True))
        self._parse = csv.ParseOptions(quote_char=False)
        self._convert = csv.ConvertOptions(
            column_types=types, include_columns=self._names, null_values=[], check_utf8=False
        )
        self._column_names = numbers

    def read(self, piece: bytes) -> CsvTexts:
        """Returns the columns of whole lines. Raises UnusualTextError."""
        # pyarrow reads hexadecimal numbers; the search for one byte saves that for two, which takes longer.
        is_hexadecimal = any(one in piece and b"0" + one in piece for one in (b"x", b"X"))
        if b'"' in piece or is_hexadecimal:
            raise UnusualTextError
        options = csv.ReadOptions(
            use_threads=False, block_size=len(piece) + 1, column_names=self._column_names
        )
        try:
            table = csv.read_csv(pa.BufferReader(piece), options, self._parse, self._convert)
        except pa.ArrowInvalid:
            raise UnusualTextError from None
        if table.num_rows != piece.count(b"\n"):
            raise UnusualTextError
        arrival, prompt, output = (table.column(name).combine_chunks() for name in self._names)
        return CsvTexts(arrival, prompt.to_numpy(), output.to_numpy())


def split_header(piece: bytes) -> tuple[list[str], bytes]:
    """Returns the fields of the first line, and the text after it. Raises UnusualTextError for quotes."""
    line, _, rest = piece.partition(b"\n")
    if b'"' in line:
        raise UnusualTextError
    return line.removesuffix(b"\r").decode().split(","), rest
