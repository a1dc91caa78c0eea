"""The traffic of a shard: the arrivals of a source that belong to its replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from policies.core.request import Request
from sim.workload.base import Arrival, Source, WorkloadNotes
from sim.workload.chunks import Chunk, arrivals_of, chunks_of


class ShardSource:
    """A source with the arrivals for which `is_own` is true, by request id. Its requests keep their ids.

    The whole traffic is read where it is, in every shard; there is no process that hands it out.
    """

    def __init__(self, source: Source, is_own: NDArray[np.bool_]) -> None:
        self.num_requests: int | None = int(np.count_nonzero(is_own))
        self.last_arrival_s = source.last_arrival_s
        self.patience_s = source.patience_s
        self._source = source
        self._is_own = is_own

    @property
    def notes(self) -> WorkloadNotes:
        """Notes of the whole traffic."""
        return self._source.notes

    def arrivals(self) -> Iterator[Arrival]:
        return islice(
            arrivals_of(self._own_rows(chunk) for chunk in chunks_of(self._source)), self.num_requests
        )

    def _own_rows(self, chunk: Chunk) -> Chunk:
        ids = chunk.request_id
        if len(ids) and ids.max() >= len(self._is_own):  # after the end of the run
            chunk = chunk.where(ids < len(self._is_own))
        return chunk.where(self._is_own[chunk.request_id])

    def follow_ups(self, request: Request, now: float, num_output_tokens: int) -> Sequence[Arrival]:
        return ()
