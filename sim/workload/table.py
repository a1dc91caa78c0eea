"""Open-loop traffic from arrays; requests become objects only when they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Literal

import numpy as np

from policies.core.request import Branching, Request, Segment
from sim.workload.base import Arrival, WorkloadNotes
from sim.workload.chunks import ROWS, Chunk, Common, ObjectArray, arrivals_of, rows_of
from sim.workload.distributions import FloatArray, IntArray

SegmentsOfRow = Callable[[int, int], tuple[Segment, ...]]  # (row, prompt tokens) -> content of the prompt


class TableSource:
    """Creates one request per row of a table; there are no follow-up requests.

    All arrays are [N] and sorted by arrival_s; the row number is the request id. priorities None: all 0.
    max_tokens exact: the output tokens of each request. deadlines_s: see `due_s`. branching: the same for all
    requests. samples_NW: output tokens of each sample if their lengths differ; output_tokens is the longest.
    tenants, session_ids None: requests have none.
    """

    is_open_loop = True

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
        tenants: ObjectArray | None = None,
        session_ids: IntArray | None = None,
    ):
        self.num_requests: int | None = len(arrival_s)
        self.last_arrival_s: float | None = float(arrival_s[-1]) if len(arrival_s) else None
        self.patience_s = patience_s
        self.notes = notes
        numbers = np.arange(len(arrival_s))
        self._whole = Chunk(
            request_id=numbers,
            at_s=arrival_s,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            priority=priorities,
            session_id=session_ids,
            tenant=tenants,
            samples_NW=samples_NW,
            content=None if segments is None else numbers,
            common=Common(max_tokens, deadlines_s, branching, segments),
        )

    def chunks(self) -> Iterator[Chunk]:
        """Yields the rows of the table."""
        starts = range(0, len(self._whole), ROWS)
        return (self._whole.where(slice(start, start + ROWS)) for start in starts)

    def arrivals(self) -> Iterator[Arrival]:
        return arrivals_of(self.chunks())

    def follow_ups(self, request: Request, now: float, num_output_tokens: int) -> Sequence[Arrival]:
        return ()


def block_segments(content_ids: tuple[int, ...], num_tokens: int, block: int) -> tuple[Segment, ...]:
    """Returns the content of num_tokens tokens, of which each id names `block`; the last may name fewer."""
    full, rest = divmod(num_tokens, block)
    whole = tuple(rows_of(Segment, content_ids[:full], repeat(block)))
    return whole + tuple(Segment(content_id, rest) for content_id in content_ids[full : full + 1] if rest)
