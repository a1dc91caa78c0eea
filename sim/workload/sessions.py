"""Sessions that a closed loop begins, when another one has ended; and those that are in progress."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from policies.core.request import Request
from sim.workload.arrivals import ArrivalProcess, ClosedLoop
from sim.workload.base import Arrival, Source, SourceAround
from sim.workload.distributions import FloatArray, stream


class SessionPool(SourceAround):
    """The sessions of another source, begun by a closed loop in place of that source's own times.

    Each of the loop's users has one session at a time; a request without a session is one of its own. A
    session has ended when all its requests have, and no more follow. Its requests that do not follow ended
    ones, as recorded calls, keep their times after its first one. The user begins the next session
    think_time_s later, in the order of the source, until there are no more or duration_s has passed.
    """

    def __init__(self, source: Source, loop: ClosedLoop, *, seed: int, duration_s: float | None) -> None:
        """Creates the traffic. source: all sessions; its arrivals come session after session."""
        super().__init__(source)
        self.num_requests = source.num_requests if duration_s is None else None
        self.last_arrival_s = None
        self.is_open_loop = False
        self._loop = loop
        self._rng = stream(seed, "session_pool")
        self._end_s = math.inf if duration_s is None else duration_s
        self._sessions = (list(own) for _, own in groupby(source.arrivals(), lambda one: _key(one.request)))
        self._num_open = Counter[int]()
        """Requests of each session that have not ended."""

    def arrivals(self) -> Iterator[Arrival]:
        firsts_s = self._loop.first_s(num_requests=None, duration_s=self._end_s).tolist()
        return heapq.merge(*map(self._begun, firsts_s), key=lambda arrival: arrival.request.arrival_s)

    def follow_ups(self, request: Request, now: float, num_output_tokens: int) -> Sequence[Arrival]:
        following = list(self._source.follow_ups(request, now, num_output_tokens))
        session = _key(request)
        self._num_open[session] += len(following) - 1
        if self._num_open[session]:
            return following
        del self._num_open[session]
        think_s = float(self._loop.think_s(self._rng.standard_normal(1))[0])
        return [*following, *self._begun(now + think_s)]

    def _begun(self, begin_s: float) -> Iterator[Arrival]:
        """Yields the next session, if there is one and it begins in time."""
        session = next(self._sessions, None) if begin_s < self._end_s else None
        if session is not None:
            first = session[0].request
            self._num_open[_key(first)] += len(session)
            for one in session:
                at_s = begin_s + (one.request.arrival_s - first.arrival_s)
                yield one._replace(request=one.request._replace(arrival_s=at_s))


def require_number_in_a_loop(workload: Any, name: str) -> None:
    """Raises ValueError if a closed loop begins the sessions and their number, a field, is not set."""
    if isinstance(workload.arrivals, ClosedLoop) and getattr(workload, name) is None:
        raise ValueError(
            f"{name}=null: must be set with arrivals by a closed loop, as sessions begin when others end"
        )


def begin_s(
    arrivals: ArrivalProcess | ClosedLoop, *, seed: int, num_sessions: int | None, duration_s: float | None
) -> FloatArray:
    """Returns the times at which sessions begin; 0 s for those of a closed loop, which decides them later."""
    if isinstance(arrivals, ClosedLoop):
        assert num_sessions is not None, "checked by require_number_in_a_loop"
        return np.zeros(num_sessions)
    return arrivals.times_s(stream(seed, "arrivals"), num_requests=num_sessions, duration_s=duration_s)


def in_a_loop(
    source: Source, arrivals: ArrivalProcess | ClosedLoop, *, seed: int, duration_s: float | None
) -> Source:
    """Returns the source, whose sessions a closed loop begins if `arrivals` is one."""
    if not isinstance(arrivals, ClosedLoop):
        return source
    return SessionPool(source, arrivals, seed=seed, duration_s=duration_s)


def _key(request: Request) -> int:
    """Returns a number of the session of a request, or a negative one of a request without a session."""
    return -1 - request.request_id if request.session_id is None else request.session_id


class OpenSessions(SourceAround):
    """The requests of another source, of which it keeps the sessions as long as `after` may ask for them."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._session_of: dict[int, int] = {}  # by request id

    def after(self, request_id: int) -> Collection[int]:
        """Returns the sessions with requests behind an id; later calls have the same id or a greater one.

        If the requests up to this id have ended, all requests of the other sessions have ended, and no more
        follow.
        """
        self._session_of = {key: value for key, value in self._session_of.items() if key > request_id}
        return set(self._session_of.values())

    def _changed(self, arrival: Arrival) -> Arrival:
        request = arrival.request
        if request.session_id is not None:
            self._session_of[request.request_id] = request.session_id
        return arrival
