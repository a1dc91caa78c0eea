"""Traffic that knows the sessions of its latest requests, for latencies of whole sessions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from policies.core.request import Request
from sim.workload.base import Arrival, Source, WorkloadNotes, is_open_loop


class OpenSessions:
    """The requests of another source, of which it keeps the sessions as long as `after` may ask for them."""

    def __init__(self, source: Source) -> None:
        self.num_requests = source.num_requests
        self.last_arrival_s = source.last_arrival_s
        self.patience_s = source.patience_s
        self.is_open_loop = is_open_loop(source)
        self._source = source
        self._session_of: dict[int, int] = {}  # by request id

    @property
    def notes(self) -> WorkloadNotes:
        """Notes of the other source."""
        return self._source.notes

    def after(self, request_id: int) -> Collection[int]:
        """Returns the sessions with requests behind an id; later calls have the same id or a greater one.

        If the requests up to this id have ended, all requests of the other sessions have ended, and no more
        follow.
        """
        self._session_of = {key: value for key, value in self._session_of.items() if key > request_id}
        return set(self._session_of.values())

    def arrivals(self) -> Iterator[Arrival]:
        return map(self._noted, self._source.arrivals())

    def follow_ups(self, request: Request, now: float, num_output_tokens: int) -> Sequence[Arrival]:
        following = self._source.follow_ups(request, now, num_output_tokens)
        return [self._noted(arrival) for arrival in following]

    def _noted(self, arrival: Arrival) -> Arrival:
        request = arrival.request
        if request.session_id is not None:
            self._session_of[request.request_id] = request.session_id
        return arrival
