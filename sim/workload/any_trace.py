"""Reads a trace with automatic format detection: a published format, or a table with columns of any names.

A note reports the detected format, because a wrong unit of time would change the rate a thousandfold. Missing
information is never guessed: the error names the setting that provides it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sim.settings.errors import suggest
from sim.workload.arrival_times import DateClock
from sim.workload.base import Source
from sim.workload.distributions import MAX_ARRIVAL_S
from sim.workload.formats import (
    FAILED,
    NO_TOKENS,
    ApexJsonl,
    AzureCsv,
    BailianJsonl,
    BasetenParquet,
    BlisTraceV2,
    BurstGptCsv,
    ChutesParquet,
    MooncakeJsonl,
    PlainCsv,
    SplitwiseCsv,
    TraceLabJsonl,
    VidurCsv,
)
from sim.workload.otel_traces import OtelTrace
from sim.workload.token_ids import TokenIdsJsonl
from sim.workload.trace_columns import Columns, shown
from sim.workload.trace_files import lines_of, opened, require_file
from sim.workload.trace_tables import CSV, JSON_LINES, PARQUET, JsonElements, Table
from sim.workload.traces import (
    DATES,
    MICROSECONDS,
    MILLISECONDS,
    NANOSECONDS,
    SECONDS,
    HashedTrace,
    Layout,
    Times,
    Trace,
)

PUBLISHED: Mapping[type[Trace], str] = {
    AzureCsv: "an Azure LLM inference trace",
    BurstGptCsv: "a BurstGPT trace",
    VidurCsv: "a Vidur trace",
    PlainCsv: "arrival_s,prompt_tokens,output_tokens",
    BlisTraceV2: "a BLIS TraceV2",
    SplitwiseCsv: "a splitwise-sim trace",
    BasetenParquet: "a Baseten trace",
    ChutesParquet: "a Chutes trace",
    TokenIdsJsonl: "token ids",
    TraceLabJsonl: "a TraceLab trace",
    ApexJsonl: "an APEX+ trace",
    BailianJsonl: "a Qwen-Bailian trace",
    MooncakeJsonl: "a Mooncake trace",
    OtelTrace: "OpenTelemetry spans",
}
"""Formats recognised by their columns, tried in this order, and their names."""
SHOWN_BY: Mapping[type[Trace], tuple[str, ...]] = {
    BailianJsonl: ("chat_id",),
    MooncakeJsonl: ("hash_ids",),
}
"""Columns required to recognise a format whose names of times and lengths are common."""
OTHERS = {
    ("session_id", "delay"): "mooncake_sessions",
    ("conversations",): "sharegpt_json",
    ("custom_id", "body"): "openai_batch",
    ("hash_id_scope", "requests"): "weka_jsonl",
}
"""Keys of files whose requests have no times -> the workload that reads them."""

UNITS: Mapping[str, Times] = {
    "s": SECONDS,
    "ms": MILLISECONDS,
    "us": MICROSECONDS,
    "ns": NANOSECONDS,
    "date": DATES,
}
SUFFIXES = {
    "s": "s",
    "sec": "s",
    "secs": "s",
    "seconds": "s",
    "ms": "ms",
    "millis": "ms",
    "milliseconds": "ms",
    "us": "us",
    "micros": "us",
    "microseconds": "us",
    "ns": "ns",
    "nanos": "ns",
    "nanoseconds": "ns",
}
"""Last word of a time column's name -> its unit."""
NAMES: Mapping[str, str] = {
    "arrival": """arrival arrivaltime arrivaltimestamp arrivedat requesttime requesttimestamp requeststarttime
        requestedat senttime sentat sendtime submittime submittedat starttime starttimestamp startedat start
        timestamp time datetime date ts createdat createdtime created""",
    "prompt": """prompttokens inputtokens contexttokens requesttokens numprompttokens numinputtokens
        prompttokencount inputtokencount numprefilltokens prefilltokens tokensin inputtoks promptlength
        inputlength promptlen inputlen promptsize isl""",
    "output": """outputtokens completiontokens generatedtokens responsetokens generationtokens
        numoutputtokens numgeneratedtokens numcompletiontokens outputtokencount completiontokencount
        candidatestokencount numdecodetokens decodetokens tokensout outputtoks outputlength outputlen
        generatedlen tokensize osl""",
    "tenant": "tenant tenantid userid user customer customerid orgid teamid",
    "session": "sessionid conversationid chatid",
    "hashes": "hashids",
}
"""Meaning -> column names in lower-case letters only, the most likely first."""
NEEDED = ("arrival", "prompt", "output")
MEANINGS = (*NAMES, "status")
FIRST_ROWS = 100
"""Number of rows used to detect whether times are dates."""
ROWS = JsonElements("an object with the values of a request")
"""A JSON file that is one list, or whose objects have several lines each."""
SPAN_KEYS = {"resourceSpans", "spans", "scopeSpans"}
"""Keys of OpenTelemetry's files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnyTrace:
    """A trace in a published format, or a table (CSV, JSON, Parquet) with a time and two lengths per row.

    columns: meaning (`MEANINGS`) -> name of the column; others are found by their names. A row with an
    unsuccessful status, without tokens, or without an output is counted but not replayed. time_unit: unit of
    the times; needed if neither the name nor the values of the column show it. tokens_per_hash: tokens that
    an id of `hashes` stands for. The other settings are those of `Trace`.
    """

    path: Path
    columns: Mapping[str, str | None] = field(default_factory=dict, hash=False)
    time_unit: Literal["s", "ms", "us", "ns", "date"] | None = None
    tokens_per_hash: int | None = None
    start_s: float | None = None
    duration_s: float | None = None
    max_requests: int | None = None
    sort: bool = False
    patience_s: float | None = None
    window_by_seed: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path).expanduser())
        require_file(self.path)
        for meaning in self.columns:
            if meaning not in MEANINGS:
                raise ValueError(f"columns.{meaning}: no such column; {suggest(meaning, MEANINGS)}")
        _ = self.found  # raises ValueError

    @property
    def found(self) -> Found:
        """Returns the trace in the format of the file. Raises ValueError if the format cannot be detected."""
        table = _table_of(self.path)
        names = list(table.names(self.path))
        shared: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(Trace)}
        given = {meaning: name for meaning, name in self.columns.items() if name is not None}
        kind = None if given or self.time_unit else _published(table, names)
        if kind is not None:
            sized = self.tokens_per_hash is not None and issubclass(kind, HashedTrace)
            settings: dict[str, Any] = {"tokens_per_hash": self.tokens_per_hash} if sized else {}
            trace = kind(**shared, **settings)
            return Found(trace, f"The file is read as {PUBLISHED[kind]}{_times_of(trace)}.")
        other = next((name for keys, name in OTHERS.items() if {*keys} <= {*names}), None)
        if other and not given:
            raise ValueError(
                f"{self.path}: has {shown(', '.join(names), 200)}; workload={other} reads such files"
            )
        columns = self._columns(names, given)
        unit = self.time_unit or _unit_of(self.path, table, columns.arrival)
        if unit is None:
            raise ValueError(
                f"time_unit=null: must be s, ms, us, ns or date, as neither the name of the column "
                f"{columns.arrival} nor its first value states the unit"
            )
        trace = OwnTable(
            **shared, declared=Layout(table, columns, UNITS[unit]), tokens_per_hash=self.tokens_per_hash or 1
        )
        read = {meaning: getattr(columns, meaning) for meaning in MEANINGS if getattr(columns, meaning)}
        listed = ", ".join(f"{meaning}={shown(name)}" for meaning, name in read.items())
        return Found(trace, f"The columns of the trace are read as {listed}{_times_of(trace)}.")

    def source(self, *, seed: int, max_model_len: int) -> Source:
        """Creates the traffic of the window, with a note on how the file is read."""
        trace, remark = self.found
        source = trace.source(seed=seed, max_model_len=max_model_len)
        source.notes.remarks.insert(0, remark)
        return source

    def _columns(self, names: list[str], given: Mapping[str, str]) -> Columns:
        """Returns the columns of a table by their names, explicitly set ones first. Raises ValueError."""
        for meaning, name in given.items():
            if name not in names:
                raise ValueError(f"columns.{meaning}={name}: no such column; {suggest(name, names)}")
            if [*given.values()].count(name) > 1:
                raise ValueError(f"columns.{meaning}={name}: must be a column that no other name stands for")
        plain = {_plain(name): name for name in reversed(names)}
        chosen = dict(given)
        for meaning, known in NAMES.items():
            fitting = [
                plain[one] for one in known.split() if one in plain and plain[one] not in given.values()
            ]
            if fitting:
                chosen.setdefault(meaning, fitting[0])
        missing = [meaning for meaning in NEEDED if meaning not in chosen]
        if missing:
            settings = " ".join(f"workload.columns.{meaning}=NAME" for meaning in missing)
            raise ValueError(
                f"{self.path}: no column has a known name for {' or '.join(_NOUNS[one] for one in missing)}; "
                f"set {settings}; found {shown(', '.join(names), 200) or 'an empty file'}"
            )
        if "hashes" in chosen and self.tokens_per_hash is None:
            raise ValueError(
                f"tokens_per_hash=null: must be given, as the trace has {chosen['hashes']}, which identify "
                "the contents of prompts"
            )
        named: dict[str, Any] = chosen
        return Columns(**named, failed=FAILED, empty=NO_TOKENS, unknown="no token counts")


_NOUNS = {"arrival": "the arrival time", "prompt": "the prompt tokens", "output": "the output tokens"}


class Found(NamedTuple):
    """The trace in the format of its file, and a sentence on it."""

    trace: Trace
    remark: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnTable(HashedTrace):
    """A table with columns of any names."""

    declared: Layout

    @property
    def layout(self) -> Layout:
        """Returns the file description from the settings."""
        return self.declared


def _table_of(path: Path) -> Table:
    """Returns the kind of a file by its first characters. Raises ValueError."""
    with opened(path) as file:
        if file.read(4) == b"PAR1":
            return PARQUET
    first = next((line for line in lines_of(path) if not line.isspace()), "").lstrip()
    if not first.startswith(("{", "[")):
        return CSV
    try:
        row = json.loads(first)
    except (ValueError, RecursionError):
        return ROWS
    return JSON_LINES if isinstance(row, dict) and SPAN_KEYS.isdisjoint(row) else ROWS


def _published(table: Table, names: Iterable[str]) -> type[Trace] | None:
    """Returns the published format of a table with these columns; None: unknown."""
    found = {*names}
    if table is ROWS:
        return None if found.isdisjoint(SPAN_KEYS) else OtelTrace
    for kind in PUBLISHED:
        needed = {*kind.columns.required, *SHOWN_BY.get(kind, ())}
        if kind.table is table and needed <= found and found.isdisjoint(kind.columns.refused):
            return kind
    return None


def _times_of(trace: Trace) -> str:
    times = trace.layout.times
    return f", times in {times.unit}" if times.unit else ", times as dates" if times is DATES else ""


def _plain(name: str) -> str:
    """Returns a name in lower-case letters only, without a unit at its end."""
    return re.sub(r"[^a-z0-9]", "", "_".join(_words(name, without_unit=True)))


def _words(name: str, *, without_unit: bool) -> list[str]:
    words = re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    has_unit = without_unit and len(words) > 1 and words[-1] in SUFFIXES
    return words[:-1] if has_unit else words


def _unit_of(path: Path, table: Table, name: str) -> str | None:
    """Returns the unit of a time column; None if neither its name nor its values show it."""
    suffix = SUFFIXES.get("".join(_words(name, without_unit=False)[-1:]))
    columns = Columns(arrival=name, prompt=name, output=name)
    for piece in islice(table.pieces(path, columns, DateClock(), 0.0), 1):
        for record in islice(piece.records(), FIRST_ROWS):
            value: Any = record.values.get(name)
            if value in (None, ""):
                continue
            try:
                number = float(value)
            except (TypeError, ValueError):
                return "date"
            return suffix or ("s" if number >= MAX_ARRIVAL_S else None)
    return suffix
