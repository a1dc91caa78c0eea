"""Scales the arrival rate of a workload (root key `load`) and leaves the requests as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from policies.core.request import Request
from sim.workload.base import Arrival, Source, WorkloadNotes, is_open_loop
from sim.workload.chunks import Chunk, ChunkedSource, chunks_of, objects


def faster(source: Source, load: float) -> FasterSource:
    """Returns a source with `load` times the arrival rate of another one."""
    kind = FasterColumns if isinstance(source, ChunkedSource) else FasterSource
    return kind(source, load)


class FasterSource:
    """A source with the open-loop arrivals of another one at `load` times the rate.

    Deadlines, and the moments at which clients give up, keep their distance from the arrival, and think times
    between turns stay the same.
    """

    def __init__(self, source: Source, load: float) -> None:
        self.num_requests = source.num_requests
        self.last_arrival_s = None if source.last_arrival_s is None else source.last_arrival_s / load
        self.patience_s = source.patience_s
        self.is_open_loop = is_open_loop(source)
        self._source = source
        self._load = load

    @property
    def notes(self) -> WorkloadNotes:
        """Notes of the other source."""
        return self._source.notes

    def arrivals(self) -> Iterator[Arrival]:
        return map(self._faster, self._source.arrivals())

    def _faster(self, arrival: Arrival) -> Arrival:
        request, at_s = arrival.request, arrival.time_s
        arrival_s = request.arrival_s / self._load
        due_s, gives_up_s = request.deadline_s, arrival.gives_up_s
        return arrival._replace(
            request=request._replace(
                arrival_s=arrival_s,
                deadline_s=None if due_s is None else due_s - request.arrival_s + arrival_s,
            ),
            time_s=None if at_s is None else at_s / self._load,
            gives_up_s=None if gives_up_s is None else gives_up_s - arrival.at_s * (1 - 1 / self._load),
        )

    def follow_ups(self, request: Request, now: float, num_output_tokens: int) -> Sequence[Arrival]:
        return self._source.follow_ups(request, now, num_output_tokens)


class FasterColumns(FasterSource):
    """A `FasterSource` of a source with columns, which stay columns."""

    def chunks(self) -> Iterator[Chunk]:
        """Yields the same requests as columns."""
        for chunk in chunks_of(self._source):
            if chunk.made is not None:
                made = [self._faster(arrival) for arrival in chunk.made]
                yield replace(chunk, made=objects(made), at_s=np.array([arrival.at_s for arrival in made]))
                continue
            at_s, due_s = chunk.at_s / self._load, chunk.due_s()
            yield replace(chunk, at_s=at_s, deadline_s=None if due_s is None else due_s - chunk.at_s + at_s)
