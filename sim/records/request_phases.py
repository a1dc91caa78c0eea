"""The phases of a request, in order: waiting, loading, prefill, decode, paused, preempted.

Prefill and decode of an attempt that was lost to a crash or a timeout are one phase, "in vain". Phases are
derived from the rows of the request in `sim.records.run`. A phase of length 0 is omitted, unless it is a
wait.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from sim.records.event_rows import WAIT_COLUMNS, WAITS
from sim.records.table import AnyTable, column

QUEUED = ("waiting", "preempted")
"""Phases in which a request is in the queue."""

# The phase of a request after an event; other events do not change the phase.
_PHASE_AFTER = {
    "arrive": "waiting",
    "load": "loading",
    "swap_in": "loading",
    "admit": "prefill",
    "resume": "prefill",
    "resume_swapped": "prefill",
    "first_token": "decode",
    "prefilled": "decode",
    "preempt": "preempted",
    "preempt_swap": "preempted",
    "pause": "paused",
    "unpause": "decode",
    "unserved": None,
    "lost": "waiting",
    "timed_out": "waiting",
    "hand_over": "waiting",
    "adopt": "decode",
    "end": None,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestPhase:
    """One phase of a request, from start_s to end_s, in seconds.

    waited_s: seconds by cause, for a queue or loading phase. began, ended: the events at its ends, as rows
    with the columns of `events_table`; ended is None if the run ended first.
    """

    name: str
    start_s: float
    end_s: float
    waited_s: dict[str, float]
    began: Any
    ended: Any

    @property
    def cause(self) -> str:
        """The main cause of a wait; empty for other phases."""
        return max(self.waited_s, key=lambda cause: self.waited_s[cause]) if self.waited_s else ""


def phases_of(rows: Iterable[Any], end_s: float) -> list[RequestPhase]:
    """Returns the phases of one request, from its events in order of time.

    end_s: end of the run, in seconds.
    """
    found: list[RequestPhase] = []
    name: str | None = None
    began: Any = None
    num_prompt_tokens = 0
    for row in rows:
        if row.event not in _PHASE_AFTER:
            continue
        if name is not None:
            is_in_vain = row.event in ("lost", "timed_out") and name not in QUEUED
            found.append(_phase("in vain" if is_in_vain else name, began, row, row.time_s))
        if row.event == "arrive":
            num_prompt_tokens = row.tokens
        after = _PHASE_AFTER[row.event]
        if after == "prefill" and name == "loading":  # as EngineCore.loaded decides it
            is_complete = row.of_tokens - row.tokens == 1 and row.of_tokens > num_prompt_tokens
            after = "decode" if is_complete else after
        name, began = after, row
    if name is not None:
        found.append(_phase(name, began, None, max(end_s, began.time_s)))
    return [phase for phase in found if phase.end_s > phase.start_s or phase.name in QUEUED]


def phases_by_request(events: AnyTable, end_s: float) -> Iterator[tuple[int, list[RequestPhase]]]:
    """Yields the id of every request of an events table and its phases, in order of ids."""
    own = events.take(np.flatnonzero(column(events, "request_id") >= 0))
    own = own.take(np.argsort(column(own, "request_id"), kind="stable"))
    of_columns = namedtuple("of_columns", list(own))  # type: ignore[misc]
    rows: list[Any] = []
    row: Any
    for row in map(of_columns, *(column(own, name).tolist() for name in own)):
        if rows and row.request_id != rows[0].request_id:
            yield rows[0].request_id, phases_of(rows, end_s)
            rows = []
        rows.append(row)
    if rows:
        yield rows[0].request_id, phases_of(rows, end_s)


def _phase(name: str, began: Any, ended: Any, end_s: float) -> RequestPhase:
    waited_s: dict[str, float] = {}
    if ended is not None and (name in QUEUED or name == "loading"):
        parts = zip(WAITS, (getattr(ended, column) for column in WAIT_COLUMNS), strict=True)
        waited_s = {cause: part_s for cause, part_s in parts if part_s > 0}
        held_s = end_s - began.time_s - sum(waited_s.values())
        if name == "waiting" and held_s > 1e-9 * max(1.0, end_s):
            waited_s["gateway"] = held_s  # held by no replica
    return RequestPhase(
        name=name, start_s=began.time_s, end_s=end_s, waited_s=waited_s, began=began, ended=ended
    )
