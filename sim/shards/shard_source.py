"""The traffic of a shard: the arrivals of a source that belong to its replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from policies.core.request import Request
from sim.workload.base import Arrival, Source


class ShardSource:
    """A source with the arrivals for which `is_own` is true, by request id. Its requests keep their ids.

    The whole traffic is read where it is, in every shard; there is no process that hands it out.
    """

    def __init__(self, source: Source, is_own: NDArray[np.bool_]) -> None:
        self.num_requests: int | None = int(np.count_nonzero(is_own))
        self.last_arrival_s = source.last_arrival_s
        self.patience_s = source.patience_s
        self.notes = source.notes
        self._source = source
        self._is_own = is_own

    def arrivals(self) -> Iterator[Arrival]:
        is_own, num_ids = memoryview(self._is_own), len(self._is_own)  # type: ignore[arg-type]
        own = (
            arrival
            for arrival in self._source.arrivals()
            if arrival.request.request_id < num_ids and is_own[arrival.request.request_id]
        )
        return islice(own, self.num_requests)

    def follow_ups(self, request: Request, now: float, num_output_tokens: int) -> Sequence[Arrival]:
        return ()
