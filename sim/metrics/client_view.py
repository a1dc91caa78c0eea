"""Client-side metrics: time to publish, and whether tokens arrive as fast as users read.

A user begins to read when the first token is published and reads r tokens/s. Token j (from 0) is published at
a_j, and its earliest reading time is max over i <= j of (a_i + (j - i) / r). The stalls of an output sum to
max over j of (a_j - j / r) - a_0; without a stall, the output is never slower than reading.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.metrics.definitions import Window
from sim.metrics.distributions import Kept
from sim.metrics.token_times import TokenTimes
from sim.metrics.workload import WorkloadRecords
from sim.records.table import AnyTable, Table, column

ROUNDING_S = 1e-9
"""Maximum stall that counts as a rounding error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientView:
    """View of the clients of a run. hidden_tokens: one per request, in the order of the request table."""

    hidden_tokens: NDArray[np.int64]
    streams: bool = True
    moderation_s: float = 0.0
    reading_tokens_per_s: float | None = None
    publish_slo_s: float | None = None


class ClientTimes(NamedTuple):
    """Client-side times of the requests that arrived in the window; each array has one value per request.

    published_in_slo: whether it finished and was published within the limit; None: no limit. stall_s: the
    waiting time of its reader; None: not computed.
    """

    publish_s: NDArray[np.float64]
    finished: NDArray[np.bool_]
    hidden_tokens: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    published_in_slo: NDArray[np.bool_] | None
    stall_s: NDArray[np.float64] | None

    @property
    def never_slower(self) -> NDArray[np.bool_]:
        """Returns which requests finished with tokens arriving at least as fast as they are read."""
        assert self.stall_s is not None
        return self.finished & (self.stall_s <= ROUNDING_S)


Ints = NDArray[np.int64]
NewView = Callable[[AnyTable, Ints], ClientView]
"""Returns the view of the requests of a table, given their numbers."""
NO_REQUESTS = Table({name: np.zeros(0, np.int64) for name in ("session_id", "output_tokens")})
APART = (
    "which tokens are hidden depends on the number of a request in its session or part, which a shard does "
    "not know; set sim.shards=null"
)


class ClientsFigure:
    """The sections `publish` and `clients`, for requests that arrived in the window.

    Both are None if a request has several samples, because their token times are unknown. in_shards: whether
    this accumulator covers only a part of the requests. draws: whether the hidden tokens of a request depend
    on its number.
    """

    needs_tokens = True

    def __init__(self, new_view: NewView, *, in_shards: bool, draws: bool, kept: Kept) -> None:
        self._new_view = new_view
        self._kept = kept
        self._numbers_matter = in_shards and draws
        self._numbers = SessionNumbers()
        self.lack: str | None = None
        self._totals = kept.totals()
        self._publish, self._stall = kept.values(), kept.values()
        self._has_samples = False

    def add(self, records: WorkloadRecords) -> None:
        """Adds requests, in the order of their ids."""
        requests = records.requests
        session = column(requests, "session_id", np.int64)
        if self._numbers_matter and (records.is_part or (session >= 0).any()):
            self.lack = APART
        if self.lack is not None or self._has_samples:
            return
        numbers = self._numbers.of(session, column(requests, "request_id", np.int64))
        seen = client_times(records, self._new_view(requests, numbers))
        if seen is None:
            self._has_samples = True
            return
        self._totals.add("requests", np.ones(len(seen.finished), np.bool_))
        self._totals.add("hidden_tokens", seen.hidden_tokens)
        self._totals.add("tokens", seen.num_tokens)
        if seen.published_in_slo is not None:
            self._totals.add("published_in_slo", seen.published_in_slo)
        self._publish.add(seen.publish_s)
        if seen.stall_s is not None:
            self._totals.add("never_slower", seen.never_slower)
            self._stall.add(seen.stall_s[seen.finished])

    def merge(self, other: ClientsFigure) -> None:
        """Adds the requests of other, which is not changed."""
        self.lack = self.lack or other.lack
        self._has_samples = self._has_samples or other._has_samples
        self._totals.merge(other._totals)
        self._publish.merge(other._publish)
        self._stall.merge(other._stall)

    def value(self, window: Window) -> Mapping[str, Any]:
        """Returns the sections; both None if a request has several samples."""
        if self.lack is not None:
            return {}
        if self._has_samples:
            return {"publish": None, "clients": None}
        view = self._new_view(NO_REQUESTS, np.zeros(0, np.int64))
        if window.is_empty:
            nothing = ClientsFigure(self._new_view, in_shards=False, draws=False, kept=self._kept)
            return nothing._sections(view)
        return self._sections(view)

    def _sections(self, view: ClientView) -> Mapping[str, Any]:
        totals = self._totals
        count, tokens = totals["requests"], totals["tokens"]
        reading = None
        if view.reading_tokens_per_s is not None:
            reading = {
                "tokens_per_s": view.reading_tokens_per_s,
                "never_slower_share": totals["never_slower"] / count if count else None,
                "stall": self._stall.describe(),
            }
        has_limit = view.publish_slo_s is not None and count
        return {
            "publish": self._publish.describe(),
            "clients": {
                "streams": view.streams,
                "moderation_s": view.moderation_s,
                "hidden_share": totals["hidden_tokens"] / tokens if tokens else None,
                "publish_slo_s": view.publish_slo_s,
                "publish_slo_share": totals["published_in_slo"] / count if has_limit else None,
                "reading": reading,
            },
        }

    def __getstate__(self) -> dict[str, Any]:
        """Drops the function that creates views: the copy can only be merged."""
        return {name: value for name, value in vars(self).items() if name not in ("_new_view", "_numbers")}


class PublishLatencies:
    """The time to publish of each request: see `sim.metrics.workload.OwnLatency`.

    Arguments as for `ClientsFigure`. numbers_matter: see `OwnLatency`.
    """

    needs_tokens = True

    def __init__(self, new_view: NewView, *, in_shards: bool, draws: bool) -> None:
        self._new_view = new_view
        self._numbers = SessionNumbers()
        self.numbers_matter = in_shards and draws

    def see(self, records: WorkloadRecords) -> None:
        """Does nothing, because the latency depends only on the request itself."""

    def known(self, records: WorkloadRecords, open_sessions: Collection[int]) -> NDArray[np.bool_]:
        """Returns True for every request: all latencies are known."""
        return np.ones(len(records.requests), np.bool_)

    def latencies(self, records: WorkloadRecords) -> Mapping[str, NDArray[np.float64]]:
        """Returns the time to publish of each request, in seconds; NaN: it is not published."""
        requests = records.requests
        session = column(requests, "session_id", np.int64)
        assert not (self.numbers_matter and (session >= 0).any()), APART
        numbers = self._numbers.of(session, column(requests, "request_id", np.int64))
        return {"publish": publish_times_s(records, self._new_view(requests, numbers))}


class SessionNumbers:
    """Numbers of requests: the position in the session, or the id of a request without a session.

    Uses 16 bytes per session.
    """

    def __init__(self) -> None:
        self._sessions: Ints = np.zeros(0, np.int64)
        self._counts: Ints = np.zeros(0, np.int64)

    def of(self, session: Ints, request_id: Ints) -> Ints:
        """Returns the numbers of the next requests in the order of their ids. session: -1: none."""
        has_session = session >= 0
        if not has_session.any():
            return request_id
        found, at, added = np.unique(session[has_session], return_inverse=True, return_counts=True)
        in_order = np.argsort(at, kind="stable")
        places = np.empty(len(at), np.int64)
        places[in_order] = np.arange(len(at)) - np.repeat(np.cumsum(added) - added, added)
        sessions = np.union1d(self._sessions, found)
        counts = np.zeros(len(sessions), np.int64)
        counts[np.searchsorted(sessions, self._sessions)] = self._counts
        own = np.searchsorted(sessions, found)
        numbers = request_id.copy()
        numbers[has_session] = places + counts[own][at]
        counts[own] += added
        self._sessions, self._counts = sessions, counts
        return numbers


def client_times(records: WorkloadRecords, view: ClientView) -> ClientTimes | None:
    """Computes the client view; None if a request has several samples, whose times are unknown."""
    times = records.token_times()
    if times is None:
        return None
    arrival_s = column(records.requests, "arrival_s", np.float64)
    finished = column(records.requests, "status") == "finished"
    inside = records.window.holds(arrival_s)
    publish_s = published_s(times, view, finished) - arrival_s
    slo_s = view.publish_slo_s
    met = None if slo_s is None else (finished & (publish_s <= slo_s))[inside]
    stall_s = None if view.reading_tokens_per_s is None else stalls_s(times, view)[inside]
    return ClientTimes(
        publish_s[inside],
        finished[inside],
        view.hidden_tokens[inside],
        times.num_tokens[inside],
        met,
        stall_s,
    )


def publish_times_s(records: WorkloadRecords, view: ClientView) -> NDArray[np.float64]:
    """Computes the time to publish of each request, in seconds; NaN if it is not published.

    Raises ValueError if a request has several samples.
    """
    times = records.token_times()
    if times is None:
        raise ValueError("the time to publish of requests with several samples is not known")
    finished = column(records.requests, "status") == "finished"
    arrival_s = column(records.requests, "arrival_s", np.float64)
    seconds: NDArray[np.float64] = published_s(times, view, finished) - arrival_s
    return seconds


def published_s(times: TokenTimes, view: ClientView, finished: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Computes the time at which each request's first visible token is published; NaN if never."""
    found = np.full(len(times.num_tokens), np.nan)
    if view.streams:
        begun = times.num_tokens > 0
        found[begun] = times.time_s[(times.first + view.hidden_tokens)[begun]]
    else:
        done = finished & (times.num_tokens > 0)
        found[done] = times.time_s[(times.first + times.num_tokens - 1)[done]]
    return found + view.moderation_s


def stalls_s(times: TokenTimes, view: ClientView) -> NDArray[np.float64]:
    """Computes the waiting time of each request's reader; NaN for requests without a token."""
    found = np.full(len(times.num_tokens), np.nan)
    begun = np.flatnonzero(times.num_tokens > 0)
    if not view.streams:
        found[begun] = 0.0
        return found
    assert view.reading_tokens_per_s is not None
    row = np.repeat(np.arange(len(times.num_tokens)), times.num_tokens)
    place = np.arange(len(times.time_s)) - (times.first + view.hidden_tokens)[row]
    late_s = np.where(place < 0, -np.inf, times.time_s - place / view.reading_tokens_per_s)
    first_s = times.time_s[(times.first + view.hidden_tokens)[begun]]
    found[begun] = np.maximum.reduceat(late_s, times.first[begun]) - first_s if len(begun) else 0.0
    return found
