"""Reads request traces in CSV: Azure LLM inference, BurstGPT, Vidur, and a plain format of our own.

Each format is a class with the names of its columns and the format of its times. Other columns are ignored.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from sim.workload.checks import MAX_ARRIVAL_S, MAX_TOKENS
from sim.workload.chunks import objects
from sim.workload.csv_pieces import CsvPieces, CsvTexts, split_header
from sim.workload.dates import DateClock
from sim.workload.distributions import FloatArray
from sim.workload.trace_blocks import Block, TraceRow, blocks_of_rows
from sim.workload.trace_files import MAX_SHOWN, UnusualTextError, lines_of, pieces_of, shown
from sim.workload.traces import Trace

FAILED = "failed: no output tokens"


class RowClock(Protocol):
    """Converts the texts of arrival times, in the order of the rows, to seconds from the trace's zero."""

    def __call__(self, text: str) -> float:
        """Returns a time. Raises ValueError."""
        ...

    def of_texts(self, texts: pa.Array) -> FloatArray | None:
        """Returns the times of consecutive rows; None if they must be read one by one."""
        ...

    def take_remark(self) -> str:
        """Returns a sentence on how the times are read, once; otherwise an empty text."""
        ...


class CsvColumns(NamedTuple):
    """The names of the three columns that a replay needs."""

    arrival: str
    prompt: str
    output: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CsvTrace(Trace):
    """Base class of CSV formats: a file with a header line."""

    columns: ClassVar[CsvColumns]
    arrival_rule: ClassVar[str] = f"a number of seconds >= 0, at most {MAX_ARRIVAL_S:g} after the first"
    min_output_tokens: ClassVar[int] = 1  # 0: a row without output is a failed request

    def clock(self) -> RowClock:
        """Returns the reader of arrival times of one pass over the file."""
        return self.number_clock()

    def blocks(self) -> Iterator[Block]:
        clock, columns, num_lines = self.clock(), None, 0
        try:
            for piece in pieces_of(self.path):
                if columns is None:
                    names, piece = split_header(piece)
                    columns, num_lines = CsvPieces(names, self._positions(names)), 1
                if piece:
                    block = self._block(columns.read(piece), num_lines + 1, clock)
                    num_lines += len(block)
                    yield block
        except UnusualTextError:
            yield from blocks_of_rows(
                self._rows(clock, None if columns is None else columns.header, num_lines)
            )

    def _block(self, texts: CsvTexts, line: int, clock: RowClock) -> Block:
        """Returns the rows of a piece. Raises UnusualTextError unless all values are right."""
        arrival_s = clock.of_texts(texts.arrival)
        prompts, outputs = texts.prompt, texts.output
        is_right = (outputs >= self.min_output_tokens) & (outputs <= MAX_TOKENS)
        is_right &= ((prompts >= 1) & (prompts <= MAX_TOKENS)) | (outputs == 0)
        if arrival_s is None or not is_right.all():
            raise UnusualTextError
        failed = outputs == 0
        remark = clock.take_remark()
        return Block(
            line=np.arange(line, line + len(arrival_s)),
            arrival_s=arrival_s,
            prompt_tokens=prompts,
            output_tokens=outputs,
            skip_reason=objects(["", FAILED])[failed.astype(np.int64)] if failed.any() else None,
            remarks=(remark,) if remark else (),
        )

    def _rows(self, clock: RowClock, header: list[str] | None, num_lines: int) -> Iterator[TraceRow]:
        """Yields the rows after the first num_lines lines. header: None: it is the first row."""
        reader = csv.reader(islice(lines_of(self.path), num_lines, None))
        try:
            header = next(reader, []) if header is None else header
            arrival_at, prompt_at, output_at = self._positions(header)
            width, min_output = len(header), self.min_output_tokens
            for fields in reader:
                if not fields:
                    continue  # a blank line
                line = num_lines + reader.line_num
                try:
                    arrival_s = clock(fields[arrival_at])
                    prompt, output = int(fields[prompt_at]), int(fields[output_at])
                    sound = len(fields) == width and min_output <= output <= MAX_TOKENS
                    sound = sound and (1 <= prompt <= MAX_TOKENS or not output)
                except (ValueError, IndexError):
                    sound = False
                if not sound:
                    raise self._bad_row(line, header, fields, clock)
                row = TraceRow(line, arrival_s, prompt, output)
                if remark := clock.take_remark():
                    row = row._replace(remark=remark)
                yield row if output else row._replace(skip_reason=FAILED)
        except csv.Error as error:
            raise ValueError(
                f"{self.path}:{num_lines + reader.line_num}:1: expected CSV, found: {error}"
            ) from None

    def _positions(self, header: list[str]) -> list[int]:
        wanted = ",".join(self.columns)
        if not header:
            raise ValueError(f"{self.path}:1:1: expected a header with {wanted}, found an empty line or file")
        for name in self.columns:
            if name not in header:
                raise ValueError(
                    f"{self.path}:1:1: no column {name}; expected a header with {wanted}, "
                    f"found {shown(','.join(header), 200)}"
                )
            if header.count(name) > 1:
                raise ValueError(
                    f"{self.path}:1:1: has {header.count(name)} columns {name}; rename or remove all but one"
                )
        return [header.index(name) for name in self.columns]

    def _bad_row(self, line: int, header: list[str], fields: list[str], clock: RowClock) -> ValueError:
        """Returns the error of a row; its column counts characters from 1 (for rows without quotes)."""
        rules: dict[str, tuple[Callable[[str], float], str]] = {
            self.columns.arrival: (clock, self.arrival_rule),
            self.columns.prompt: _tokens_from(1),
            self.columns.output: _tokens_from(self.min_output_tokens),
        }
        column = 1
        for name, text in zip(header, fields, strict=False):
            read, rule = rules.get(name, (len, ""))
            if not _reads(read, text):
                return ValueError(
                    f"{self.path}:{line}:{column}: {name}: expected {rule}, found {text[:MAX_SHOWN]!r}"
                )
            column += len(text) + 1
        if len(fields) < len(header):
            column -= 1  # the row ends where a comma should follow
        return ValueError(
            f"{self.path}:{line}:{column}: expected {len(header)} fields ({shown(','.join(header), 200)}), "
            f"found {len(fields)}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AzureCsv(CsvTrace):
    """Azure LLM inference traces 2023 and 2024 (Patel et al., ISCA 2024; Stojkovic et al., HPCA 2025).

    Times are dates with up to seven fractional digits, which are all kept; the first row is at 0 s.
    """

    columns: ClassVar[CsvColumns] = CsvColumns("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    arrival_rule: ClassVar[str] = "a time such as 2023-11-16 18:17:03.9799600"

    def clock(self) -> RowClock:
        return DateClock()


@dataclass(frozen=True, kw_only=True, slots=True)
class BurstGptCsv(CsvTrace):
    """BurstGPT (Wang et al., KDD 2025). Rows without response tokens are failures; they are only counted."""

    columns: ClassVar[CsvColumns] = CsvColumns("Timestamp", "Request tokens", "Response tokens")
    min_output_tokens: ClassVar[int] = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class VidurCsv(CsvTrace):
    """Vidur's replay traces (Agrawal et al., MLSys 2024)."""

    columns: ClassVar[CsvColumns] = CsvColumns("arrived_at", "num_prefill_tokens", "num_decode_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainCsv(CsvTrace):
    """A minimal format for your own traces."""

    columns: ClassVar[CsvColumns] = CsvColumns("arrival_s", "prompt_tokens", "output_tokens")


def _tokens_from(minimum: int) -> tuple[Callable[[str], int], str]:
    """Returns a function that reads a number of tokens, and the rule that it checks."""

    def read(text: str) -> int:
        number = int(text)
        if not minimum <= number <= MAX_TOKENS:
            raise ValueError(text)
        return number

    return read, f"a whole number of tokens from {minimum} to {MAX_TOKENS:,}"


def _reads(read: Callable[[str], float], text: str) -> bool:
    try:
        read(text)
    except ValueError:
        return False
    return True
