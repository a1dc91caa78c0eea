"""Traffic that is too short for a question, made longer: the same arrivals again and again.

Each copy begins one mean gap after the last arrival of the copy before, so the mean rate stays the same. Its
prompts, outputs and sessions are other ones with the same lengths: a copy has prefix hits among its own
requests, as the original has, and none in copies before it.
"""

from __future__ import annotations

from policies.core.request import Prompt, Request, Segment
from sim.workload.base import Arrival
from sim.workload.listed import ListedSource


def repeated(source: ListedSource, num_requests: int) -> ListedSource:
    """Returns the first num_requests of endlessly many copies of the traffic.

    Two arrivals at 0 s and 10 s have a mean gap of 10 s, so they come again at 20 s and 30 s. Raises
    ValueError for traffic without a rate: fewer than two arrivals, or all at one time.
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
    """Returns the largest content id or session id of a request, 0 without any."""
    ids = [segment.content_id for segment in request.prompt.segments]
    return max([0, *ids, request.answer_id or 0, request.session_id or 0])


def _copied(arrival: Arrival, request_id: int, later_s: float, more: int) -> Arrival:
    """Returns an arrival later_s later, with other ids: `more` is added to those of contents and sessions."""
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
