"""Base classes of recorded traces: the common settings of all formats, and the reading of declared formats.

A format declares its table and its columns (`formats`). Times in a row count from the trace's own zero; its
`start_s`, or without one the first arrival, is 0 s of the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from sim.workload.arrival_times import ArrivalClock, Clock, DateClock, ReadyClock
from sim.workload.base import Source
from sim.workload.chunks import objects
from sim.workload.distributions import MAX_ARRIVAL_S, require_not_negative, require_positive
from sim.workload.trace_columns import Columns, unused_columns
from sim.workload.trace_files import UnusualTextError, require_file
from sim.workload.trace_reading import Reading
from sim.workload.trace_rows import Block, SortedRows, blocks_of_rows
from sim.workload.trace_source import TraceSource, Window, checked_once
from sim.workload.trace_tables import Record, Table


@dataclass(frozen=True, slots=True)
class Times:
    """The arrivals of a format: numbers, or values read by a format-specific clock.

    unit, exponent: for numbers; the power of ten is 3 for milliseconds. rule: the values that the clock
    expects.
    """

    unit: str = ""
    exponent: int = 0
    clock: Callable[[], Clock] | None = None
    rule: str = ""


SECONDS, MILLISECONDS = Times("seconds"), Times("ms", 3)
MICROSECONDS, NANOSECONDS = Times("us", 6), Times("ns", 9)
DATES = Times(clock=DateClock, rule="a time such as 2023-11-16 18:17:03.9799600")
READY = Times(clock=ReadyClock)
"""Marker for `Trace.records` that yields Unix times in seconds, which count from the earliest."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The kind of a file, the meaning of its columns, and how its times are written."""

    table: Table
    columns: Columns
    times: Times


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Settings of every trace.

    path: the file; .gz and .zst are read directly. start_s and duration_s select a window of the trace, in
    the trace's own time; start_s None: it begins with the first arrival. max_requests limits it further.
    sort: sort rows that are not in order of time instead of rejecting them. patience_s: a client aborts its
    request this long after its arrival. window_by_seed: seed k replays the k-th window of duration_s after
    start_s, so several seeds show the variation between windows.
    """

    columns: ClassVar[Columns]
    table: ClassVar[Table]
    times: ClassVar[Times] = SECONDS
    has_any_order: ClassVar[bool] = False
    """True: rows need not be in order of time, and are sorted without the setting `sort`."""
    note: ClassVar[str] = ""
    """The note on `READY` times, in which {start} is the date of the earliest."""
    nothing: ClassVar[str] = ":2:1: expected at least one request"
    """The error of a file without rows, after its name."""

    path: Path
    start_s: float | None = None
    duration_s: float | None = None
    max_requests: int | None = None
    sort: bool = False
    patience_s: float | None = None
    window_by_seed: bool = False

    def __post_init__(self) -> None:
        _ = self.layout  # raises ValueError if the format declares none
        object.__setattr__(self, "path", Path(self.path).expanduser())
        require_not_negative(self, "start_s")
        require_positive(self, "duration_s", "max_requests", "patience_s")
        if self.window_by_seed and self.duration_s is None:
            raise ValueError(
                "window_by_seed=true, duration_s=null: duration_s must be set to the length of a window"
            )
        require_file(self.path)

    @property
    def layout(self) -> Layout:
        """Returns the declared layout of the file. Raises ValueError if the class declares none."""
        kind = type(self)
        if not hasattr(kind, "columns") or not hasattr(kind, "table"):
            raise ValueError(
                f"{kind.__name__}: a format of traces must declare columns and table, as "
                "sim.workload.traces.Trace describes them"
            )
        return Layout(kind.table, kind.columns, kind.times)

    @property
    def is_in_unix_time(self) -> bool:
        """Returns whether the window begins at a Unix time, which is then the origin of times."""
        return (self.start_s or 0.0) >= MAX_ARRIVAL_S

    def clock(self) -> Clock:
        """Returns the reader of arrival times of one pass over the file."""
        layout = self.layout
        if layout.times.clock is not None:
            return layout.times.clock()
        return ArrivalClock(
            layout.times.exponent, from_first=not self.is_in_unix_time, has_texts=layout.table.has_texts
        )

    @property
    def time_rule(self) -> str:
        """The rule of an arrival, for messages."""
        times = self.layout.times
        return times.rule or self.layout.table.time_rule(times.unit, MAX_ARRIVAL_S * 10**times.exponent)

    def reading(self, columns: Columns, clock: Clock) -> Reading:
        """Returns the reader of the rows of one pass over the file."""
        return Reading(columns, clock, self.time_rule)

    def blocks(self) -> Iterator[Block]:
        """Yields the rows in the order of the file, with times from the trace's zero, in blocks.

        Every call starts from the beginning. Raises ValueError at a bad row, after the rows before it.
        """
        clock = self.clock()
        columns = self.layout.columns.in_file(self.column_names)
        reading = self.reading(columns, clock)
        has_plain_rows = type(self).records is Trace.records
        start_s = 0.0 if self.sort or self.has_any_order else self.start_s or 0.0
        for piece in self.layout.table.pieces(self.path, columns, clock, start_s):
            try:
                if not has_plain_rows:
                    raise UnusualTextError
                yield reading.block(piece.columns(), piece.number)
            except UnusualTextError:
                yield from blocks_of_rows(map(reading.row, self.records(piece.records())))
                if piece.is_rest:
                    return

    def records(self, found: Iterator[Record]) -> Iterator[Record]:
        """Yields the rows with the columns of the format, one or more per table row."""
        return found

    def column_names(self) -> Iterable[str]:
        """Returns the names of the columns in the file, as far as they are known before it is read."""
        return self.layout.table.names(self.path)

    def finished(self, blocks: Callable[[], Iterator[Block]]) -> Iterator[Block]:
        """Yields the rows with values that depend on other rows. blocks: yields all rows in order of time."""
        if self.layout.times is READY:
            blocks = partial(self._since_earliest, blocks)
        return blocks()

    def _since_earliest(self, blocks: Callable[[], Iterator[Block]]) -> Iterator[Block]:
        """Yields the rows with times after the earliest. Raises ValueError if a row is too far from it."""
        zero_s = 0.0 if self.is_in_unix_time else None
        for block in blocks():
            if zero_s is None:
                zero_s = float(block.arrival_s[0])
                if self.note:
                    start = f"{datetime.fromtimestamp(zero_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
                    remark = self.note.format(start=start)
                    block = replace(block, remarks=(*block.remarks, remark))
            since_s = block.arrival_s - zero_s
            num_near = int(np.searchsorted(since_s, MAX_ARRIVAL_S, "right")) if zero_s else len(block)
            if num_near:
                yield replace(block, arrival_s=since_s).where(slice(num_near))
            if num_near < len(block):
                raise ValueError(
                    f"{self.path}:{block.line[num_near]}:1: {self.layout.columns.arrival}: expected times at "
                    f"most {MAX_ARRIVAL_S:g} s after the earliest, found {since_s[num_near]:g} s"
                )

    def source(self, *, seed: int, max_model_len: int) -> Source:
        """Creates the traffic of the window. The seed has no effect except with window_by_seed."""
        later_s = seed * (self.duration_s or 0.0) if self.window_by_seed else 0.0
        settings = (self, later_s, max_model_len)
        return checked_once(self.path, settings, lambda: _checked(self, later_s, max_model_len))


def _checked(trace: Trace, later_s: float, max_model_len: int) -> TraceSource:
    source = TraceSource(
        trace.path,
        SortedRows(trace.blocks()) if trace.has_any_order else trace.blocks,
        window=Window(trace.start_s, trace.duration_s, trace.max_requests, later_s),
        max_model_len=max_model_len,
        patience_s=trace.patience_s,
        sort=trace.sort,
        finish=trace.finished,
        nothing=trace.nothing,
    )
    columns = trace.layout.columns.in_file(trace.column_names)
    if remark := unused_columns(trace.column_names(), columns.all):
        source.notes.remarks.append(remark)
    return source


@dataclass(frozen=True, kw_only=True, slots=True)
class HashedTrace(Trace):
    """A trace whose prompts have contents by blocks of tokens_per_hash tokens; the last may be shorter.

    The file has their ids (`Columns.hashes`), or gives the part of a prompt shared with the session's
    previous one (`Columns.cached`); the blocks of this part keep their ids.
    """

    tokens_per_hash: int

    def __post_init__(self) -> None:
        Trace.__post_init__(self)  # super() does not work in a dataclass with slots
        require_positive(self, "tokens_per_hash")

    def reading(self, columns: Columns, clock: Clock) -> Reading:
        """Returns the reader of the rows of one pass over the file."""
        return Reading(columns, clock, self.time_rule, self.tokens_per_hash)

    def finished(self, blocks: Callable[[], Iterator[Block]]) -> Iterator[Block]:
        """Yields the rows with the ids of their contents. blocks: yields all rows in order of time."""
        found = partial(Trace.finished, self, blocks)
        return self._with_cached(found) if self.layout.columns.cached else found()

    def _with_cached(self, blocks: Callable[[], Iterator[Block]]) -> Iterator[Block]:
        """Yields rows whose full blocks have ids: those of the session's previous prompt, then new ones.

        Requests then have no session, because their calls arrive at the recorded times.
        """
        num_left = Counter(session for block in blocks() for session in _sessions(block))
        previous: dict[int, tuple[int, ...]] = {}  # session -> ids of its latest prompt
        num_ids = 0
        for block in blocks():
            contents = []
            assert block.content_ids is not None
            for (cached, total), session in zip(block.content_ids, _sessions(block), strict=True):
                num_blocks = total // self.tokens_per_hash
                ids = previous.pop(session, ())[: min(cached // self.tokens_per_hash, num_blocks)]
                num_new = num_blocks - len(ids)
                ids += tuple(range(num_ids, num_ids + num_new))
                num_ids += num_new
                num_left[session] -= 1
                if num_left[session]:
                    previous[session] = ids
                contents.append((self.tokens_per_hash, *ids))
            yield replace(block, content_ids=objects(contents), session_id=None)


def _sessions(block: Block) -> list[int]:
    assert block.session_id is not None
    sessions: list[int] = block.session_id.tolist()
    return sessions
