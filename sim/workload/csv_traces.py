"""Reads request traces in CSV: Azure LLM inference, BurstGPT, Vidur, and a plain format of our own.

Each format is a class with the names of its columns and the format of its times. Other columns are ignored.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar, NamedTuple

from sim.workload.checks import MAX_ARRIVAL_S, MAX_TOKENS
from sim.workload.trace_blocks import TraceRow
from sim.workload.trace_files import lines_of
from sim.workload.traces import Trace

Clock = Callable[[str], float]
"""Converts the text of an arrival time to seconds from the trace's zero; raises ValueError."""


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

    def date_clock(self) -> Clock | None:
        """Returns the function that reads arrival times as dates; None if they are numbers."""
        return None

    def rows(self) -> Iterator[TraceRow]:
        reader = csv.reader(lines_of(self.path))
        try:
            header = next(reader, [])
            arrival_at, prompt_at, output_at = self._positions(header)
            numbers = self.number_clock()
            to_seconds = self.date_clock() or numbers
            width, min_output = len(header), self.min_output_tokens
            for fields in reader:
                if not fields:
                    continue  # a blank line
                try:
                    arrival_s = to_seconds(fields[arrival_at])
                    prompt, output = int(fields[prompt_at]), int(fields[output_at])
                    sound = len(fields) == width and min_output <= output <= MAX_TOKENS
                    sound = sound and (1 <= prompt <= MAX_TOKENS or not output)
                except (ValueError, IndexError):
                    sound = False
                if not sound:
                    raise self._bad_row(reader.line_num, header, fields, to_seconds)
                row = TraceRow(reader.line_num, arrival_s, prompt, output)
                if remark := numbers.take_remark():
                    row = row._replace(remark=remark)
                yield row if output else row._replace(skip_reason="failed: no output tokens")
        except csv.Error as error:
            raise ValueError(f"{self.path}:{reader.line_num}:1: expected CSV, found: {error}") from None

    def _positions(self, header: list[str]) -> list[int]:
        wanted = ",".join(self.columns)
        if not header:
            raise ValueError(f"{self.path}:1:1: expected a header with {wanted}, found an empty line or file")
        for name in self.columns:
            if name not in header:
                raise ValueError(
                    f"{self.path}:1:1: no column {name}; expected a header with {wanted}, "
                    f"found {','.join(header)[:200]}"
                )
            if header.count(name) > 1:
                raise ValueError(
                    f"{self.path}:1:1: has {header.count(name)} columns {name}; rename or remove all but one"
                )
        return [header.index(name) for name in self.columns]

    def _bad_row(self, line: int, header: list[str], fields: list[str], clock: Clock) -> ValueError:
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
                return ValueError(f"{self.path}:{line}:{column}: {name}: expected {rule}, found {text!r}")
            column += len(text) + 1
        if len(fields) < len(header):
            column -= 1  # the row ends where a comma should follow
        return ValueError(
            f"{self.path}:{line}:{column}: expected {len(header)} fields ({','.join(header)}), "
            f"found {len(fields)}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AzureCsv(CsvTrace):
    """Azure LLM inference traces 2023 and 2024 (Patel et al., ISCA 2024; Stojkovic et al., HPCA 2025).

    Times are dates with up to seven fractional digits, which are all kept; the first row is at 0 s.
    """

    columns: ClassVar[CsvColumns] = CsvColumns("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    arrival_rule: ClassVar[str] = "a time such as 2023-11-16 18:17:03.9799600"

    def date_clock(self) -> Clock:
        return _date_clock()


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


def _date_clock() -> Clock:
    """Returns a function that reads `2023-11-16 18:17:03.9799600` as seconds after the first time it reads.

    A suffix `+00:00` is allowed. The date is parsed once per minute of the trace: strptime takes ten times as
    long as the rest of a row and reads only six fractional digits. A double cannot hold seconds since 1970
    with seven fractional digits.
    """
    minutes_s: dict[str, float] = {}  # "2023-11-16 18:17:" -> seconds from the first row to that minute
    first: list[tuple[datetime, float]] = []  # minute and second of the first row, once it has been read

    def start_of(minute: str, second_s: float) -> float:
        start = datetime.strptime(minute, "%Y-%m-%d %H:%M:")
        if not first:
            first.append((start, second_s))
        return (start - first[0][0]).total_seconds() - first[0][1]

    def read(text: str) -> float:
        minute, second_s = text[:17], float(text[17:].removesuffix("+00:00"))
        if not 0 <= second_s < 61:  # 60 is a leap second
            raise ValueError(text)
        minute_s = minutes_s.get(minute)
        if minute_s is None:
            minute_s = minutes_s[minute] = start_of(minute, second_s)
        return minute_s + second_s

    return read


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
