"""Open-loop traffic as a list of requests, which can be replayed: its busiest window, and longer traffic.

Traffic that is too short is extended with copies of the same arrivals. Each copy begins one mean gap after
the last arrival of the previous copy, so the mean rate stays the same. Its prompts, outputs and sessions are
different ones with the same lengths: a copy has prefix hits among its own requests, like the original, and
none from earlier copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from policies.core.request import Prompt, Request, Segment
from sim.workload.base import Arrival, Source, WorkloadNotes


class ListedSource:
    """A source with a list of arrivals, sorted by `at_s`; there are no follow-up requests."""

    is_open_loop = True

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

    def follow_ups(self, request: Request, now: float, num_output_tokens: int) -> Sequence[Arrival]:
        return ()


def listed(source: Source) -> ListedSource:
    """Reads all arrivals of an open-loop source."""
    return ListedSource(list(source.arrivals()), notes=source.notes, patience_s=source.patience_s)


def busiest_window(source: ListedSource, duration_s: float) -> tuple[ListedSource, float]:
    """Returns the window of duration_s with the most tokens (prompts and outputs), and its start in seconds.

    The window starts with a request, which then arrives at 0 s. Shorter traffic is returned unchanged.
    """
    arrivals = source.listed
    if not arrivals or arrivals[-1].at_s < duration_s:
        return source, 0.0
    at_s = np.array([arrival.at_s for arrival in arrivals])
    tokens = [arrival.request.prompt.num_tokens + arrival.num_output_tokens for arrival in arrivals]
    sums = np.concatenate([[0], np.cumsum(tokens)])
    ends = np.searchsorted(at_s, at_s + duration_s)
    # A window that extends beyond the end of the traffic would be shorter than the others.
    inside = np.flatnonzero(at_s + duration_s <= at_s[-1])
    begins = inside if len(inside) else np.array([0])
    first = int(begins[np.argmax(sums[ends[begins]] - sums[begins])])
    start_s = float(at_s[first])
    shifted = [_shifted(arrival, i, start_s) for i, arrival in enumerate(arrivals[first : ends[first]])]
    return ListedSource(shifted, notes=source.notes, patience_s=source.patience_s), start_s


def _shifted(arrival: Arrival, request_id: int, start_s: float) -> Arrival:
    """Shifts all times of an arrival by -start_s and sets its request id."""
    request, due_s = arrival.request, arrival.request.deadline_s
    return arrival._replace(
        request=request._replace(
            request_id=request_id,
            arrival_s=request.arrival_s - start_s,
            deadline_s=None if due_s is None else due_s - start_s,
        ),
        time_s=None if arrival.time_s is None else arrival.time_s - start_s,
        gives_up_s=None if arrival.gives_up_s is None else arrival.gives_up_s - start_s,
    )


def repeated(source: ListedSource, num_requests: int) -> ListedSource:
    """Returns the first num_requests requests of infinitely many copies of the traffic.

    Two arrivals at 0 s and 10 s have a mean gap of 10 s, so they repeat at 20 s and 30 s. Raises ValueError
    for traffic without a rate: fewer than two arrivals, or all at one time.
    """
    arrivals, last_s = source.listed, source.last_arrival_s
    count = len(arrivals)
    if count < 2 or not last_s:
        raise ValueError(f"{count} requests at once have no rate at which they could be repeated")
    period_s = last_s * count / (count - 1)
    step = 1 + max(_largest_id(arrival.request) for arrival in arrivals)
    made = [
        _copied(arrivals[i % count], i, (i // count) * period_s, (i // count) * step)
        for i in range(num_requests)
    ]
    return ListedSource(made, notes=source.notes, patience_s=source.patience_s)


def _largest_id(request: Request) -> int:
    """Returns the largest content id or session id of a request; 0 if there are none."""
    ids = [segment.content_id for segment in request.prompt.segments]
    return max([0, *ids, request.answer_id or 0, request.session_id or 0])


def _copied(arrival: Arrival, request_id: int, later_s: float, more: int) -> Arrival:
    """Returns an arrival later_s later, with new ids: `more` is added to content and session ids."""
    request = arrival.request
    prompt = request.prompt
    segments = tuple(Segment(content + more, tokens) for content, tokens in prompt.segments)
    return arrival._replace(
        request=request._replace(
            request_id=request_id,
            arrival_s=request.arrival_s + later_s,
            prompt=Prompt(prompt.num_tokens, segments, prompt.num_pinned),
            session_id=None if request.session_id is None else request.session_id + more,
            answer_id=None if request.answer_id is None else request.answer_id + more,
            deadline_s=None if request.deadline_s is None else request.deadline_s + later_s,
        ),
        time_s=None if arrival.time_s is None else arrival.time_s + later_s,
        gives_up_s=None if arrival.gives_up_s is None else arrival.gives_up_s + later_s,
    )
