"""Reads request traces in CSV: Azure LLM inference, BurstGPT, Vidur, BLIS, and a plain format of our own.

Each format is a class with the names of its columns and the format of its times. Other columns are not used;
those that may matter are named in a note (`unused_columns`).
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import islice
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from policies.core.request import Segment
from sim.workload.checks import MAX_ARRIVAL_S, MAX_TOKENS
from sim.workload.chunks import objects
from sim.workload.csv_pieces import CsvPieces, CsvTexts, split_header
from sim.workload.dates import DateClock
from sim.workload.distributions import FloatArray
from sim.workload.trace_blocks import Block, TraceRow, blocks_of_rows
from sim.workload.trace_files import MAX_SHOWN, UnusualTextError, lines_of, pieces_of, shown
from sim.workload.traces import Trace
from sim.workload.values import tokens, tokens_rule, whole_number

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


class FurtherColumns(NamedTuple):
    """The names of columns that a file may have; empty: the format has no such column."""

    status: str = ""
    """Rows of which the status is none of `DONE` are counted and not replayed."""
    tenant: str = ""
    session: str = ""
    prefix_group: str = ""
    """Requests of a group begin with the same `prefix_tokens`, which come before the prompt tokens."""
    prefix_tokens: str = ""
    served_prompt: str = ""
    """Prompt tokens as the server counted them, which count instead where there is no prefix; 0: unknown."""


NOTHING_FURTHER = FurtherColumns()
DONE = ("ok", "success", "finished", "completed")


@dataclass(frozen=True, kw_only=True, slots=True)
class CsvTrace(Trace):
    """Base class of CSV formats: a file with a header line."""

    columns: ClassVar[CsvColumns]
    arrival_rule: ClassVar[str] = f"a number of seconds >= 0, at most {MAX_ARRIVAL_S:g} after the first"
    min_output_tokens: ClassVar[int] = 1  # 0: a row without output is a failed request

    further: ClassVar[FurtherColumns] = NOTHING_FURTHER
    """Columns that are also read where a file has them."""

    def clock(self) -> RowClock:
        """Returns the reader of arrival times of one pass over the file."""
        return self.number_clock()

    def column_names(self) -> Iterable[str]:
        return next(csv.reader(lines_of(self.path)), [])

    def used_columns(self) -> Iterable[str]:
        return (*self.columns, *filter(None, self.further))

    def blocks(self) -> Iterator[Block]:
        clock, columns, num_lines = self.clock(), None, 0
        try:
            for piece in pieces_of(self.path):
                if columns is None:
                    names, piece = split_header(piece)
                    if set(names) & set(filter(None, self.further)):
                        raise UnusualTextError
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
            reads_further = bool(set(header) & set(filter(None, self.further)))
            sessions: dict[str, int] = {}
            for fields in reader:
                if not fields:
                    continue  # a blank line
                line = num_lines + reader.line_num
                try:
                    arrival_s = clock(fields[arrival_at])
                    prompt, output = whole_number(fields[prompt_at]), whole_number(fields[output_at])
                    sound = len(fields) == width and min_output <= output <= MAX_TOKENS
                    sound = sound and (1 <= prompt <= MAX_TOKENS or not output)
                except (ValueError, IndexError):
                    sound = False
                if not sound:
                    raise self._bad_row(line, header, fields, clock)
                row = TraceRow(line, arrival_s, prompt, output)
                if reads_further:
                    row = self._with_further(row, dict(zip(header, fields, strict=True)), sessions)
                if remark := clock.take_remark():
                    row = row._replace(remark=remark)
                yield row if output or row.skip_reason else row._replace(skip_reason=FAILED)
        except csv.Error as error:
            raise ValueError(
                f"{self.path}:{num_lines + reader.line_num}:1: expected CSV, found: {error}"
            ) from None

    def _with_further(self, row: TraceRow, texts: dict[str, str], sessions: dict[str, int]) -> TraceRow:
        """Returns the row with its further columns. sessions: numbers of those seen so far, by name."""
        names = self.further
        if (status := texts.get(names.status, "")) and status.lower() not in DONE:
            row = row._replace(skip_reason=f"{names.status}: {shown(status)}")
        if tenant := texts.get(names.tenant, ""):
            row = row._replace(tenant=tenant)
        if session := texts.get(names.session, ""):
            row = row._replace(session_id=sessions.setdefault(session, len(sessions)))
        prefix = texts.get(names.prefix_group, "")
        number = self._further_tokens(row, texts, names.prefix_tokens) if prefix else 0
        if number:
            digest = blake2b(prefix.encode(), digest_size=8).digest()
            content_ids = (int.from_bytes(digest, "little") >> 1, number)
            return row._replace(prompt_tokens=row.prompt_tokens + number, content_ids=content_ids)
        counted = self._further_tokens(row, texts, names.served_prompt)
        return row._replace(prompt_tokens=counted or row.prompt_tokens)

    def _further_tokens(self, row: TraceRow, texts: dict[str, str], name: str) -> int:
        """Returns a number of tokens in a further column; 0 if it is empty or missing."""
        text = texts.get(name, "")
        try:
            return tokens(text, 0) if text else 0
        except ValueError:
            raise ValueError(
                f"{self.path}:{row.line}:1: {name}: expected {tokens_rule(0)}, found {shown(text)!r}"
            ) from None

    def segments(self, content_ids: tuple[int, ...], num_tokens: int) -> tuple[Segment, ...]:
        """Returns the shared prefix of a prompt, if it has one; content_ids: its id and its tokens."""
        return tuple(
            Segment(content, min(count, num_tokens))
            for content, count in zip(content_ids[::2], content_ids[1::2], strict=True)
        )

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


@dataclass(frozen=True, kw_only=True, slots=True)
class BlisTraceV2(CsvTrace):
    """The CSV of a BLIS TraceV2 (inference-sim): times in us, tenants, sessions, statuses, shared prefixes.

    arrival_time_us counts, not send_time_us, which may have another zero. As in BLIS, input_tokens of a
    request with a prefix_group come after its prefix, and server_input_tokens count where there is none.
    Rounds of a session are replayed at their recorded times; what their prompts share is not in the file.
    """

    time_exponent: ClassVar[int] = 6
    columns: ClassVar[CsvColumns] = CsvColumns("arrival_time_us", "input_tokens", "output_tokens")
    further: ClassVar[FurtherColumns] = FurtherColumns(
        status="status",
        tenant="tenant_id",
        session="session_id",
        prefix_group="prefix_group",
        prefix_tokens="prefix_length",
        served_prompt="server_input_tokens",
    )
    arrival_rule: ClassVar[str] = f"a number of us >= 0, at most {MAX_ARRIVAL_S * 1e6:g} after the first"
    min_output_tokens: ClassVar[int] = 0


def _tokens_from(minimum: int) -> tuple[Callable[[str], int], str]:
    """Returns a function that reads a number of tokens, and the rule that it checks."""
    return partial(tokens, least=minimum), tokens_rule(minimum)


def _reads(read: Callable[[str], float], text: str) -> bool:
    try:
        read(text)
    except ValueError:
        return False
    return True
