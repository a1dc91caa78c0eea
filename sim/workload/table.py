"""Open-loop traffic that is known beforehand: arrays of requests, made into objects as they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np

from policies.core.request import Branching, Prompt, Request, Segment
from sim.workload.base import Arrival, WorkloadNotes
from sim.workload.distributions import FloatArray, IntArray

CHUNK = 4096  # rows turned into Python numbers at once: a run of 1e6 requests never holds 1e6 objects

SegmentsOfRow = Callable[[int, int], tuple[Segment, ...]]  # (row, its prompt tokens) -> content of the prompt


class TableSource:
    """A source of the rows of a table; nothing follows from an ended request.

    All arrays are [N] and sorted by arrival_s; row number = request id. priorities None: all 0. max_tokens
    exact: each request's output tokens. deadlines_s: see `due_s`. branching: of every request; samples_NW:
    output tokens of each of its branches, if they do not end together; output_tokens then are of the longest.
    """

    def __init__(
        self,
        *,
        arrival_s: FloatArray,
        prompt_tokens: IntArray,
        output_tokens: IntArray,
        notes: WorkloadNotes,
        priorities: IntArray | None = None,
        segments: SegmentsOfRow | None = None,
        max_tokens: int | Literal["exact"] | None = None,
        deadlines_s: tuple[float | None, ...] = (),
        patience_s: float | None = None,
        branching: Branching | None = None,
        samples_NW: IntArray | None = None,
    ):
        self.num_requests: int | None = len(arrival_s)
        self.last_arrival_s: float | None = float(arrival_s[-1]) if len(arrival_s) else None
        self.patience_s = patience_s
        self.notes = notes
        self._arrival_s = arrival_s
        self._prompt_tokens = prompt_tokens
        self._output_tokens = output_tokens
        self._priorities = np.zeros(len(arrival_s), np.int64) if priorities is None else priorities
        self._segments = segments
        self._max_tokens = max_tokens
        self._deadlines_s = deadlines_s
        self._branching = branching
        self._samples_NW = samples_NW

    def arrivals(self) -> Iterator[Arrival]:
        for start in range(0, len(self._arrival_s), CHUNK):
            rows = slice(start, start + CHUNK)
            columns = (self._arrival_s, self._prompt_tokens, self._output_tokens, self._priorities)
            table = zip(*(column[rows].tolist() for column in columns), strict=True)
            for row, (arrival_s, num_tokens, num_output_tokens, priority) in enumerate(table, start):
                prompt = Prompt(num_tokens, self._segments(row, num_tokens) if self._segments else ())
                max_tokens = num_output_tokens if self._max_tokens == "exact" else self._max_tokens
                deadline_s = due_s(arrival_s, priority, self._deadlines_s) if self._deadlines_s else None
                request = Request(
                    row,
                    arrival_s,
                    prompt,
                    max_tokens,
                    priority,
                    deadline_s=deadline_s,
                    branching=self._branching,
                )
                yield Arrival(request, num_output_tokens, self._samples(row))

    def _samples(self, row: int) -> tuple[int, ...]:
        """Output tokens of each sample of a row; empty where they end together, or there is one."""
        return () if self._samples_NW is None else tuple(self._samples_NW[row].tolist())

    def follow_up(self, request: Request, now: float, num_output_tokens: int) -> Arrival | None:
        return None


def due_s(arrival_s: float, priority: int, deadlines_s: tuple[float | None, ...]) -> float | None:
    """When a request's answer is due: deadlines_s[priority] after its arrival; None: no such time."""
    deadline_s = deadlines_s[priority] if deadlines_s else None
    return None if deadline_s is None else arrival_s + deadline_s
