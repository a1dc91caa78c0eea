"""Base class of recorded traces: selects a time window and clips requests to the model's context.

A format is a subclass that reads its rows (`csv_traces`, `mooncake`). Times in a row count from the trace's
own zero; its `start_s` is 0 s of the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from policies.core.request import Segment
from sim.workload.base import Source, WorkloadNotes
from sim.workload.checks import MAX_ARRIVAL_S, require_not_negative, require_positive
from sim.workload.lengths import clip_to_context
from sim.workload.marked import MarkedSource
from sim.workload.table import TableSource
from sim.workload.trace_files import require_file
from sim.workload.unix_times import ArrivalClock


class TraceRow(NamedTuple):
    """One request of a trace, already checked: lengths >= 1, arrival_s finite."""

    line: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    content_ids: tuple[int, ...] = ()  # content ids of the prompt's blocks, if the trace has them
    remark: str = ""  # note for the user on how the times were read; at most one row has it
    skip_reason: str = ""  # reason why the row is counted but not replayed; its lengths are not checked
    tenant: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Settings of every trace.

    path: the file; .gz and .zst are read directly. start_s and duration_s select a window of the trace, in
    the trace's own time; max_requests ends it earlier. sort: sort rows that are not in order of time instead
    of rejecting them. patience_s: a client aborts its request this long after its arrival. window_by_seed:
    seed k replays the k-th window of duration_s after start_s, so that several seeds show how windows differ.
    """

    time_exponent: ClassVar[int] = 0
    """Power of ten of the unit of arrival times that are numbers: 3 for milliseconds."""

    path: Path
    start_s: float = 0.0
    duration_s: float | None = None
    max_requests: int | None = None
    sort: bool = False
    patience_s: float | None = None
    window_by_seed: bool = False

    def __post_init__(self) -> None:
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
        return ArrivalClock(self.time_exponent, from_first=self.start_s < MAX_ARRIVAL_S)

    def rows(self) -> Iterator[TraceRow]:
        """Yields the rows in file order, with times from the trace's zero. Raises ValueError at a bad row."""
        raise NotImplementedError

    def segments(self, content_ids: tuple[int, ...], num_tokens: int) -> tuple[Segment, ...]:
        """Returns the content of a prompt of num_tokens tokens; empty unless the format identifies it."""
        return ()

    def source(self, *, seed: int, max_model_len: int) -> Source:
        """Creates the traffic of the window. The seed has no effect except with window_by_seed."""
        notes = WorkloadNotes()
        start_s = self.start_s + (seed * (self.duration_s or 0.0) if self.window_by_seed else 0.0)
        rows = self._window(notes, start_s)
        prompts, outputs, clipped = clip_to_context(
            np.array([row.prompt_tokens for row in rows], np.int64),
            np.array([row.output_tokens for row in rows], np.int64),
            max_model_len,
        )
        notes.num_clipped = int(np.count_nonzero(clipped))
        # Rounding restores decimal times of up to seven digits (Azure's), which subtraction has changed.
        arrival_s = np.round(np.array([row.arrival_s for row in rows]) - start_s, 7)
        contents = [row.content_ids for row in rows]

        def segments(row: int, num_tokens: int) -> tuple[Segment, ...]:
            return self.segments(contents[row], num_tokens)

        table = TableSource(
            arrival_s=arrival_s,
            prompt_tokens=prompts,
            output_tokens=outputs,
            notes=notes,
            segments=segments if any(contents) else None,
            patience_s=self.patience_s,
        )
        tenants = [row.tenant for row in rows]
        if not any(tenants):
            return table
        return MarkedSource(table, lambda request: request._replace(tenant=tenants[request.request_id]))

    def _window(self, notes: WorkloadNotes, start_s: float) -> list[TraceRow]:
        end_s = math.inf if self.duration_s is None else start_s + self.duration_s
        rows: list[TraceRow] = []
        line, last_s = 0, 0.0
        for row in self._sorted_rows() if self.sort else self.rows():
            if row.arrival_s < last_s:
                raise ValueError(
                    f"{self.path}:{row.line}:1: expected an arrival at or after that of the previous row "
                    f"({last_s:.7f} s), found {row.arrival_s:.7f} s; set workload.sort=true to sort the rows"
                )
            line, last_s = row.line, row.arrival_s
            if row.remark:
                notes.remarks.append(row.remark)
            if last_s >= end_s or len(rows) == self.max_requests:
                break  # do not read the rest of a long trace
            if last_s < start_s:
                continue
            if row.skip_reason:
                notes.skip(row.skip_reason)
            else:
                rows.append(row)
        if not line:
            raise ValueError(f"{self.path}:2:1: expected at least one request, found none")
        if not rows:
            raise ValueError(
                f"start_s={self.start_s:g}: no request of {self.path} arrives between {start_s:g} s and "
                f"{end_s:g} s; the last row that was read arrives at {last_s:g} s"
            )
        return rows

    def _sorted_rows(self) -> list[TraceRow]:
        rows = sorted(self.rows(), key=lambda row: row.arrival_s)
        if rows and rows[0].arrival_s < 0:  # dates count from the first row, which is another one now
            zero_s = rows[0].arrival_s
            return [row._replace(arrival_s=row.arrival_s - zero_s) for row in rows]
        return rows
