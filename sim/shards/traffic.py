"""The traffic of shards: the requests of a run that belong to the replicas of each shard.

The whole traffic is read where a shard is simulated; there is no process that hands it out. A process that
simulates several shards reads it once for some of them, and keeps their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import groupby
from typing import Any

import numpy as np

from policies.core.request import Request
from sim.shards.assignment import ABSENT, Assignment
from sim.workload.base import Arrival, Source, WorkloadNotes
from sim.workload.chunks import Chunk, arrivals_of, chunks_of

MAX_ROWS = 400_000
"""Requests of the shards for which the traffic is read at once; as columns they take 20 MB."""

Bounds = tuple[int, int]
"""The first replica of a shard, and the one after its last."""


class ShardSource:
    """The traffic of a shard. Its requests have their ids in the whole run."""

    is_open_loop = True

    def __init__(self, chunks: Sequence[Chunk], patience_s: float | None, notes: WorkloadNotes) -> None:
        """Creates the traffic. notes: those of the whole run."""
        self.num_requests: int | None = sum(map(len, chunks))
        self.last_arrival_s: float | None = float(chunks[-1].at_s[-1]) if chunks else None
        self.patience_s = patience_s
        self.notes = notes
        self._chunks = chunks

    def chunks(self) -> Iterator[Chunk]:
        """Yields the requests as columns."""
        return iter(self._chunks)

    def arrivals(self) -> Iterator[Arrival]:
        return arrivals_of(self._chunks)

    def follow_ups(self, request: Request, now: float, num_output_tokens: int) -> Sequence[Arrival]:
        return ()


class ShardTraffic:
    """The traffic of all shards of a run. new_source: makes the traffic of the whole run, unread."""

    def __init__(
        self, new_source: Callable[[], Source], assignment: Assignment, bounds: Sequence[Bounds]
    ) -> None:
        self._new_source = new_source
        self._assignment = assignment
        num_replicas = bounds[-1][1]
        ends = [end for _, end in bounds]
        self._shards = np.searchsorted(ends, np.arange(ABSENT, num_replicas), side="right")
        self._shards[0] = -1  # ABSENT; a request that no replica serves belongs to the first shard
        sizes = np.bincount(assignment.replicas - ABSENT, minlength=num_replicas - ABSENT)
        self._sizes = np.bincount(self._shards[1:], sizes[1:], minlength=len(bounds)).astype(np.int64)
        self._kept: dict[int, list[Chunk]] = {}

    def source(self, index: int) -> ShardSource:
        """Returns the traffic of a shard. The next shards are read with it, as far as `MAX_ROWS` allows."""
        source = self._new_source()
        if index not in self._kept:
            self._kept = self._read(source, index)
        own = self._kept.pop(index)
        return ShardSource(own, source.patience_s, self._assignment.notes)

    def _read(self, source: Source, first: int) -> dict[int, list[Chunk]]:
        """Reads the shard `first` and those after it; returns their rows."""
        upto = np.searchsorted(np.cumsum(self._sizes[first:]), MAX_ROWS, side="right")
        end = first + max(1, int(upto))
        found: dict[int, list[Chunk]] = {index: [] for index in range(first, end)}
        num_left = int(self._sizes[first:end].sum())
        replicas = self._assignment.replicas
        for chunk in chunks_of(source):
            if not num_left:
                break
            known = chunk.where(chunk.request_id < len(replicas))  # the others come after the end of the run
            shards = self._shards[replicas[known.request_id] - ABSENT]
            for index in np.unique(shards[(shards >= first) & (shards < end)]).tolist():
                own = known.where(shards == index)
                found[index].append(own)
                num_left -= len(own)
        return {index: _joined(chunks) for index, chunks in found.items()}


def _joined(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Returns the same rows in few chunks; those with the same columns are joined."""

    def columns_of(chunk: Chunk) -> tuple[object, ...]:
        names = [each.name for each in fields(chunk) if isinstance(getattr(chunk, each.name), np.ndarray)]
        return (*names, chunk.common)

    joined = []
    for (*names, _), alike in groupby(chunks, columns_of):
        parts = list(alike)
        columns: dict[str, Any] = {
            str(name): np.concatenate([getattr(part, str(name)) for part in parts]) for name in names
        }
        joined.append(replace(parts[0], **columns))
    return joined
