"""Open-loop traffic that is known beforehand: arrays of requests, made into objects as they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, count, repeat
from typing import Any, Literal, TypeVar

import numpy as np

from policies.core.request import Branching, Prompt, Request, Segment
from sim.workload.base import Arrival, WorkloadNotes
from sim.workload.distributions import FloatArray, IntArray

CHUNK = 4096  # rows turned into Python numbers at once: a run of 1e6 requests never holds 1e6 objects

Row = TypeVar("Row", bound=tuple[Any, ...])

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
        starts = range(0, len(self._arrival_s), CHUNK)
        return chain.from_iterable(map(self._arrivals_from, starts))

    def _arrivals_from(self, start: int) -> Iterator[Arrival]:
        """Those of the chunk of rows that begins at `start`."""
        columns = (self._arrival_s, self._prompt_tokens, self._output_tokens, self._priorities)
        arrival_s, prompt_tokens, output_tokens, priorities = (
            column[start : start + CHUNK].tolist() for column in columns
        )
        prompts = rows_of(Prompt, prompt_tokens, self._contents(start, prompt_tokens), repeat(0))
        requests = rows_of(
            Request,
            count(start),
            arrival_s,
            prompts,
            output_tokens if self._max_tokens == "exact" else repeat(self._max_tokens),
            priorities,
            repeat(""),
            repeat(None),
            self._deadlines(arrival_s, priorities),
            repeat(None),
            repeat(self._branching),
            repeat(None),
            repeat(None),
        )
        return rows_of(Arrival, requests, output_tokens, self._samples(start), repeat(None))

    def _contents(self, start: int, prompt_tokens: list[int]) -> Iterable[tuple[Segment, ...]]:
        """The segments of each prompt of a chunk."""
        return repeat(()) if self._segments is None else map(self._segments, count(start), prompt_tokens)

    def _deadlines(self, arrival_s: list[float], priorities: list[int]) -> Iterable[float | None]:
        """When the answer to each request of a chunk is due."""
        if not self._deadlines_s:
            return repeat(None)
        return map(due_s, arrival_s, priorities, repeat(self._deadlines_s))

    def _samples(self, start: int) -> Iterable[tuple[int, ...]]:
        """Output tokens of each sample of a chunk's requests; empty where these end together."""
        if self._samples_NW is None:
            return repeat(())
        return map(tuple, self._samples_NW[start : start + CHUNK].tolist())

    def follow_up(self, request: Request, now: float, num_output_tokens: int) -> Arrival | None:
        return None


def due_s(arrival_s: float, priority: int, deadlines_s: tuple[float | None, ...]) -> float | None:
    """When a request's answer is due: deadlines_s[priority] after its arrival; None: no such time."""
    deadline_s = deadlines_s[priority] if deadlines_s else None
    return None if deadline_s is None else arrival_s + deadline_s


def rows_of(kind: type[Row], *columns: Iterable[Any]) -> Iterator[Row]:
    """Named tuples of the rows of a table, up to the end of its shortest column; one column for each field.

    They are made without a call of Python code for each.
    """
    return map(partial(tuple.__new__, kind), zip(*columns, strict=False))
