"""The traffic of shards: the requests of a run that belong to the replicas of each shard.

Every process that simulates a shard reads the whole traffic; no process distributes it. A process that
simulates several shards reads it once for several of them, and keeps their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.core.request import Request
from sim.shards.assignment import ABSENT, Assignment
from sim.workload.base import Arrival, Source, WorkloadNotes
from sim.workload.chunks import Chunk, arrivals_of, chunks_of

MAX_ROWS = 1_200_000
"""Maximum number of requests of the shards for which the traffic is read at once; as columns they take 60 MB.
"""

Bounds = tuple[int, int]
"""The first replica of a shard, and the one after its last replica."""


class ShardSource:
    """The traffic of a shard. Its requests have their ids in the whole run."""

    is_open_loop = True

    def __init__(self, chunks: Sequence[Chunk], patience_s: float | None, notes: WorkloadNotes) -> None:
        """Creates the traffic. notes: the notes on the whole run's traffic."""
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
    """The traffic of all shards of a run. new_source: creates the traffic of the whole run, unread."""

    def __init__(
        self, new_source: Callable[[], Source], assignment: Assignment, bounds: Sequence[Bounds]
    ) -> None:
        self._new_source = new_source
        self._assignment = assignment
        num_replicas = bounds[-1][1]
        ends = [end for _, end in bounds]
        self._shards: NDArray[np.int64] = np.searchsorted(ends, np.arange(ABSENT, num_replicas), side="right")
        self._shards[0] = -1  # ABSENT; a request that no replica serves belongs to the first shard
        sizes = np.bincount(assignment.replicas - ABSENT, minlength=num_replicas - ABSENT)
        self._sizes = np.bincount(self._shards[1:], sizes[1:], minlength=len(bounds)).astype(np.int64)
        self._kept: dict[int, list[Chunk]] = {}
        self._patience_s: float | None = None

    def source(self, index: int) -> ShardSource:
        """Returns the traffic of a shard.

        The next shards are read along with it, as far as `MAX_ROWS` allows.
        """
        if index not in self._kept:
            self._kept = self._read(index)
        return ShardSource(self._kept.pop(index), self._patience_s, self._assignment.notes)

    def _read(self, first: int) -> dict[int, list[Chunk]]:
        """Reads the shard `first` and those after it; returns their rows."""
        upto = np.searchsorted(np.cumsum(self._sizes[first:]), MAX_ROWS, side="right")
        end = first + max(1, int(upto))
        num_left = int(self._sizes[first:end].sum())
        source = self._new_source()
        self._patience_s = source.patience_s
        found: list[Chunk] = []
        for chunk in chunks_of(source):
            if not num_left:
                break
            shards = self._shards_of(chunk)
            own = chunk.where((shards >= first) & (shards < end))
            if len(own):
                found.append(own)
                num_left -= len(own)
        joined = _joined(found)
        split = [(chunk, self._shards_of(chunk)) for chunk in joined]
        return {
            index: [own for chunk, shards in split if len(own := chunk.where(shards == index))]
            for index in range(first, end)
        }

    def _shards_of(self, chunk: Chunk) -> NDArray[np.int64]:
        """Returns the shard of each request, [N]; -1: it arrives after the end of the run."""
        replicas = self._assignment.replicas
        ids = chunk.request_id
        if len(ids) and ids.max() < len(replicas):
            return self._shards[replicas[ids] - ABSENT]
        found = np.full(len(ids), -1)
        known = ids < len(replicas)
        found[known] = self._shards[replicas[ids[known]] - ABSENT]
        return found


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
