"""Base class of recorded traces: the settings that all formats have.

A format is a subclass that reads its rows (`csv_traces`, `mooncake`). Times in a row count from the trace's
own zero; its `start_s`, or without one the first arrival, is 0 s of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from policies.core.request import Segment
from sim.workload.base import Source
from sim.workload.checked_traces import checked_once
from sim.workload.checks import MAX_ARRIVAL_S, require_not_negative, require_positive
from sim.workload.external_sort import SortedRows
from sim.workload.trace_blocks import Block, TraceRow, blocks_of_rows
from sim.workload.trace_files import require_file
from sim.workload.trace_source import TraceSource, Window
from sim.workload.unix_times import ArrivalClock
from sim.workload.unused_columns import unused_columns


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Settings of every trace.

    path: the file; .gz and .zst are read directly. start_s and duration_s select a window of the trace, in
    the trace's own time; start_s None: it begins with the first arrival. max_requests ends it earlier. sort:
    sort rows that are not in order of time instead of rejecting them. patience_s: a client aborts its request
    this long after its arrival. window_by_seed: seed k replays the k-th window of duration_s after start_s,
    so that several seeds show how windows differ.
    """

    time_exponent: ClassVar[int] = 0
    """Power of ten of the unit of arrival times that are numbers: 3 for milliseconds."""
    has_any_order: ClassVar[bool] = False
    """True: rows need not be in order of time, and are sorted without the setting `sort`."""

    path: Path
    start_s: float | None = None
    duration_s: float | None = None
    max_requests: int | None = None
    sort: bool = False
    patience_s: float | None = None
    window_by_seed: bool = False

    def __post_init__(self) -> None:
        if type(self).rows is Trace.rows and type(self).blocks is Trace.blocks:
            raise ValueError(
                f"{type(self).__name__}: a format of traces must define rows or blocks, as "
                "sim.workload.traces.Trace describes them"
            )
        object.__setattr__(self, "path", Path(self.path).expanduser())
        require_not_negative(self, "start_s")
        require_positive(self, "duration_s", "max_requests", "patience_s")
        if self.window_by_seed and self.duration_s is None:
            raise ValueError(
                "window_by_seed=true, duration_s=null: duration_s must be set to the length of a window"
            )
        require_file(self.path)

    def number_clock(self) -> ArrivalClock:
        """Returns the reader of arrival times that are numbers; each pass over the file needs a new one."""
        return ArrivalClock(self.time_exponent, from_first=(self.start_s or 0.0) < MAX_ARRIVAL_S)

    def blocks(self) -> Iterator[Block]:
        """Yields the rows in the order of the file, with times from the trace's zero, in blocks.

        Every call begins anew. Raises ValueError at a bad row, after the rows before it.
        """
        return blocks_of_rows(self.rows())

    def rows(self) -> Iterator[TraceRow]:
        """Yields the same rows one by one; a format defines this method or `blocks`."""
        return iter(())

    def column_names(self) -> Iterable[str]:
        """Returns the names of the columns in the file, as far as they are known before it is read."""
        return ()

    def used_columns(self) -> Iterable[str]:
        """Returns the names of the columns that this format reads."""
        return ()

    def finished(self, blocks: Callable[[], Iterator[Block]]) -> Iterator[Block]:
        """Yields the rows with what depends on other rows. blocks: yields all rows in order of time."""
        return blocks()

    def segments(self, content_ids: tuple[int, ...], num_tokens: int) -> tuple[Segment, ...]:
        """Returns the content of a prompt of num_tokens tokens; empty unless the format identifies it."""
        return ()

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
        segments=trace.segments,
        max_model_len=max_model_len,
        patience_s=trace.patience_s,
        sort=trace.sort,
        finish=trace.finished,
    )
    if remark := unused_columns(trace.column_names(), trace.used_columns()):
        source.notes.remarks.append(remark)
    return source
