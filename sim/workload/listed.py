"""Open-loop traffic as a list of requests: read once, replayed often, and a part of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from policies.core.request import Request
from sim.workload.base import Arrival, Source, WorkloadNotes


class ListedSource:
    """Arrivals that are known; sorted by `at_s`. Nothing follows from an ended request."""

    def __init__(
        self, listed: Sequence[Arrival], *, notes: WorkloadNotes, patience_s: float | None = None
    ) -> None:
        self.num_requests: int | None = len(listed)
        self.last_arrival_s: float | None = listed[-1].at_s if listed else None
        self.patience_s = patience_s
        self.notes = notes
        self.listed = listed

    def arrivals(self) -> Iterator[Arrival]:
        return iter(self.listed)

    def follow_up(self, request: Request, now: float, num_output_tokens: int) -> Arrival | None:
        return None


def listed(source: Source) -> ListedSource:
    """All arrivals of an open loop."""
    return ListedSource(list(source.arrivals()), notes=source.notes, patience_s=source.patience_s)


def busiest_window(source: ListedSource, duration_s: float) -> tuple[ListedSource, float]:
    """The requests of the window with the most tokens, prompts and answers, and when it begins.

    It begins with a request, and its first request arrives at 0 s. Traffic that is not longer stays as it is.
    """
    all_of_it = source.listed
    if not all_of_it or all_of_it[-1].at_s < duration_s:
        return source, 0.0
    at_s = np.array([arrival.at_s for arrival in all_of_it])
    tokens = [arrival.request.prompt.num_tokens + arrival.num_output_tokens for arrival in all_of_it]
    sums = np.concatenate([[0], np.cumsum(tokens)])
    ends = np.searchsorted(at_s, at_s + duration_s)
    # A window that would reach beyond the traffic is shorter than the others.
    inside = np.flatnonzero(at_s + duration_s <= at_s[-1])
    begins = inside if len(inside) else np.array([0])
    first = int(begins[np.argmax(sums[ends[begins]] - sums[begins])])
    start_s = float(at_s[first])
    moved = [_moved(arrival, i, start_s) for i, arrival in enumerate(all_of_it[first : ends[first]])]
    return ListedSource(moved, notes=source.notes, patience_s=source.patience_s), start_s


def _moved(arrival: Arrival, request_id: int, start_s: float) -> Arrival:
    """The same so much earlier."""
    request, due_s = arrival.request, arrival.request.deadline_s
    return arrival._replace(
        request=request._replace(
            request_id=request_id,
            arrival_s=request.arrival_s - start_s,
            deadline_s=None if due_s is None else due_s - start_s,
        ),
        time_s=None if arrival.time_s is None else arrival.time_s - start_s,
    )
