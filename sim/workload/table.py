"""Open-loop traffic from arrays; requests become objects only when they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count, repeat
from typing import Any, Literal, TypeVar

import numpy as np

from policies.core.request import Branching, Prompt, Request, Segment
from sim.workload.base import Arrival, WorkloadNotes
from sim.workload.distributions import FloatArray, IntArray

CHUNK = 4096  # rows converted to Python objects at once, so that 1e6 requests are never 1e6 objects

Row = TypeVar("Row", bound=tuple[Any, ...])

SegmentsOfRow = Callable[[int, int], tuple[Segment, ...]]  # (row, prompt tokens) -> content of the prompt


class TableSource:
    """Creates one request per row of a table; there are no follow-up requests.

    All arrays are [N] and sorted by arrival_s; the row number is the request id. priorities None: all 0.
    max_tokens exact: the output tokens of each request. deadlines_s: see `due_s`. branching: the same for all
    requests. samples_NW: output tokens of each sample if their lengths differ; output_tokens is the longest.
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
        """Yields the arrivals of the chunk of rows that begins at `start`."""
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
        return rows_of(Arrival, requests, output_tokens, self._samples(start), repeat(None), repeat(None))

    def _contents(self, start: int, prompt_tokens: list[int]) -> Iterable[tuple[Segment, ...]]:
        """Yields the segments of each prompt of a chunk."""
        return repeat(()) if self._segments is None else map(self._segments, count(start), prompt_tokens)

    def _deadlines(self, arrival_s: list[float], priorities: list[int]) -> Iterable[float | None]:
        """Yields the deadline of each request of a chunk, in seconds on the run's clock."""
        if not self._deadlines_s:
            return repeat(None)
        return map(due_s, arrival_s, priorities, repeat(self._deadlines_s))

    def _samples(self, start: int) -> Iterable[tuple[int, ...]]:
        """Yields the output tokens of the samples of each request of a chunk; empty if all are equal."""
        if self._samples_NW is None:
            return repeat(())
        return map(tuple, self._samples_NW[start : start + CHUNK].tolist())

    def follow_ups(self, request: Request, now: float, num_output_tokens: int) -> Sequence[Arrival]:
        return ()


def block_segments(content_ids: tuple[int, ...], num_tokens: int, block: int) -> tuple[Segment, ...]:
    """Returns the content of num_tokens tokens, of which each id names `block`; the last may name fewer."""
    full, rest = divmod(num_tokens, block)
    whole = tuple(rows_of(Segment, content_ids[:full], repeat(block)))
    return whole + tuple(Segment(content_id, rest) for content_id in content_ids[full : full + 1] if rest)


def due_s(arrival_s: float, priority: int, deadlines_s: tuple[float | None, ...]) -> float | None:
    """Returns the deadline of a request, deadlines_s[priority] after its arrival; None: no deadline."""
    deadline_s = deadlines_s[priority] if deadlines_s else None
    return None if deadline_s is None else arrival_s + deadline_s


def rows_of(kind: type[Row], *columns: Iterable[Any]) -> Iterator[Row]:
    """Yields a named tuple per row, from one column per field, up to the end of the shortest column.

    They are created without a call of Python code for each, for speed.
    """
    return map(tuple.__new__, repeat(kind), zip(*columns, strict=False))
