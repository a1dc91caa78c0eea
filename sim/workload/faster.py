"""Scales the arrival rate of a workload (root key `load`) and leaves the requests as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from policies.core.request import Request
from sim.workload.base import Arrival, Source, WorkloadNotes, is_open_loop


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
        for arrival in self._source.arrivals():
            request, at_s = arrival.request, arrival.time_s
            arrival_s = request.arrival_s / self._load
            due_s, gives_up_s = request.deadline_s, arrival.gives_up_s
            yield arrival._replace(
                request=request._replace(
                    arrival_s=arrival_s,
                    deadline_s=None if due_s is None else due_s - request.arrival_s + arrival_s,
                ),
                time_s=None if at_s is None else at_s / self._load,
                gives_up_s=None if gives_up_s is None else gives_up_s - arrival.at_s * (1 - 1 / self._load),
            )

    def follow_ups(self, request: Request, now: float, num_output_tokens: int) -> Sequence[Arrival]:
        return self._source.follow_ups(request, now, num_output_tokens)
