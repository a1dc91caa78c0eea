"""What all recorded traces share: a time window, and clipping to the model's context.

A format is a subclass that reads its rows (`csv_traces`, `mooncake`). Times in a row count from the trace's
own zero; `start_s` becomes 0 s of the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from policies.core.request import Segment
from sim.workload.base import Source, WorkloadNotes
from sim.workload.checks import require_not_negative, require_positive
from sim.workload.lengths import clip_to_context
from sim.workload.table import TableSource
from sim.workload.trace_files import require_file


class TraceRow(NamedTuple):
    """One request of a trace, already checked: lengths >= 1, arrival_s finite."""

    line: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    content_ids: tuple[int, ...] = ()  # of the prompt's blocks, if the trace names them
    skip_reason: str = ""  # why the row is counted but not replayed; its lengths are then not checked


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Settings of every trace.

    path: the file; .gz and .zst are read directly. start_s and duration_s cut a window out of the trace, in
    the trace's own time, max_requests ends it earlier. sort: put rows that are not in time order in order,
    instead of refusing them. patience_s: a client gives up this long after its arrival. window_by_seed: seed
    k replays the k-th window of duration_s behind start_s, so that several seeds say how much one window
    differs from the next.
    """

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
                "window_by_seed=true, duration_s=null: it must be set, to say how long a window is"
            )
        require_file(self.path)

    def rows(self) -> Iterator[TraceRow]:
        """The file's rows in file order, times from the trace's zero. Raises ValueError at a bad row."""
        raise NotImplementedError

    def segments(self, content_ids: tuple[int, ...], num_tokens: int) -> tuple[Segment, ...]:
        """The content of a prompt of num_tokens tokens; none unless the format names it."""
        return ()

    def source(self, *, seed: int, max_model_len: int) -> Source:
        """Replays the window. A trace has no randomness: the seed chooses a window, or changes nothing."""
        notes = WorkloadNotes()
        start_s = self.start_s + (seed * (self.duration_s or 0.0) if self.window_by_seed else 0.0)
        rows = self._window(notes, start_s)
        prompts, outputs, clipped = clip_to_context(
            np.array([row.prompt_tokens for row in rows], np.int64),
            np.array([row.output_tokens for row in rows], np.int64),
            max_model_len,
        )
        notes.num_clipped = int(np.count_nonzero(clipped))
        # Decimal times of up to seven digits (Azure's) come out exactly, whatever was subtracted on the way.
        arrival_s = np.round(np.array([row.arrival_s for row in rows]) - start_s, 7)
        contents = [row.content_ids for row in rows]

        def segments(row: int, num_tokens: int) -> tuple[Segment, ...]:
            return self.segments(contents[row], num_tokens)

        return TableSource(
            arrival_s=arrival_s,
            prompt_tokens=prompts,
            output_tokens=outputs,
            notes=notes,
            segments=segments if any(contents) else None,
            patience_s=self.patience_s,
        )

    def _window(self, notes: WorkloadNotes, start_s: float) -> list[TraceRow]:
        end_s = math.inf if self.duration_s is None else start_s + self.duration_s
        rows: list[TraceRow] = []
        line, last_s = 0, 0.0
        for row in self._sorted_rows() if self.sort else self.rows():
            if row.arrival_s < last_s:
                raise ValueError(
                    f"{self.path}:{row.line}:1: expected an arrival at or after that of the row before "
                    f"({last_s:.7f} s), found {row.arrival_s:.7f} s; sort=true sorts the rows"
                )
            line, last_s = row.line, row.arrival_s
            if last_s >= end_s or len(rows) == self.max_requests:
                break  # the rest of a long trace is not even read
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
                f"{end_s:g} s; the last row read arrives at {last_s:g} s"
            )
        return rows

    def _sorted_rows(self) -> list[TraceRow]:
        rows = sorted(self.rows(), key=lambda row: row.arrival_s)
        if rows and rows[0].arrival_s < 0:  # a trace with dates counts from its first row: now another one
            zero_s = rows[0].arrival_s
            return [row._replace(arrival_s=row.arrival_s - zero_s) for row in rows]
        return rows
