"""Adds up what clients see of a run, from parts of its records: see `sim.metrics.client_view`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.metrics.client_view import (
    ClientView,
    add_client_times,
    client_sections,
    client_times,
    publish_times_s,
)
from sim.metrics.folds.exact import ExactTotals
from sim.metrics.folds.sketch import Sketch
from sim.metrics.window import Window
from sim.metrics.workload_records import WorkloadRecords

Ints = NDArray[np.int64]
NewView = Callable[[pd.DataFrame, Ints], ClientView]
"""Returns the view of the requests of a table, given their numbers."""
NO_REQUESTS = pd.DataFrame({name: np.zeros(0, np.int64) for name in ("session_id", "output_tokens")})
APART = (
    "which tokens are hidden depends on the number of a request in its session or part, which a shard does "
    "not know; set sim.shards=null"
)


class ClientsFold:
    """The sections `publish` and `clients`.

    in_shards: whether this accumulator has a part of the requests only. draws: whether the hidden tokens of a
    request depend on its number.
    """

    needs_tokens = True

    def __init__(self, new_view: NewView, *, in_shards: bool, draws: bool) -> None:
        self._new_view = new_view
        self._numbers_matter = in_shards and draws
        self._numbers = SessionNumbers()
        self.lack: str | None = None
        self._totals = ExactTotals()
        self._publish, self._stall = Sketch(), Sketch()
        self._has_samples = False

    def add(self, records: WorkloadRecords) -> None:
        """Adds requests, in the order of their ids."""
        requests = records.requests
        session = requests["session_id"].to_numpy(np.int64)
        if self._numbers_matter and (records.is_part or (session >= 0).any()):
            self.lack = APART
        if self.lack is not None or self._has_samples:
            return
        numbers = self._numbers.of(session, requests["request_id"].to_numpy(np.int64))
        seen = client_times(records, self._new_view(requests, numbers))
        if seen is None:
            self._has_samples = True
            return
        add_client_times(self._totals, seen)
        self._publish.add(seen.publish_s)
        if seen.stall_s is not None:
            self._stall.add(seen.stall_s[seen.finished])

    def merge(self, other: ClientsFold) -> None:
        """Adds the requests of other, which is not changed."""
        self.lack = self.lack or other.lack
        self._has_samples = self._has_samples or other._has_samples
        self._totals.merge(other._totals)
        self._publish.merge(other._publish)
        self._stall.merge(other._stall)

    def figures(self, window: Window) -> Mapping[str, Any]:
        """Returns the sections; both None if a request has several samples."""
        if self.lack is not None:
            return {}
        if self._has_samples:
            return {"publish": None, "clients": None}
        view = self._new_view(NO_REQUESTS, np.zeros(0, np.int64))
        fold = self if not window.is_empty else ClientsFold(self._new_view, in_shards=False, draws=False)
        stall = None if view.reading_tokens_per_s is None else fold._stall.describe()
        return client_sections(fold._totals, fold._publish.describe(), stall, view)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out how views are made: the copy can be merged only."""
        return {name: value for name, value in vars(self).items() if name not in ("_new_view", "_numbers")}


class PublishLatencies:
    """The time to publish of each request: see `sim.metrics.folds.latencies.LatencyFold`.

    Arguments as for `ClientsFold`. numbers_matter: see `LatencyFold`.
    """

    needs_tokens = True

    def __init__(self, new_view: NewView, *, in_shards: bool, draws: bool) -> None:
        self._new_view = new_view
        self._numbers = SessionNumbers()
        self.numbers_matter = in_shards and draws

    def see(self, records: WorkloadRecords) -> None:
        """Does nothing, as the latency of a request is its own."""

    def known(self, records: WorkloadRecords, open_sessions: Collection[int]) -> NDArray[np.bool_]:
        """Returns that all latencies are known."""
        return np.ones(len(records.requests), np.bool_)

    def latencies(self, records: WorkloadRecords) -> Mapping[str, NDArray[np.float64]]:
        """Returns the time to publish of each request, in seconds; NaN: it is not published."""
        requests = records.requests
        session = requests["session_id"].to_numpy(np.int64)
        assert not (self.numbers_matter and (session >= 0).any()), APART
        numbers = self._numbers.of(session, requests["request_id"].to_numpy(np.int64))
        return {"publish": publish_times_s(records, self._new_view(requests, numbers))}


class SessionNumbers:
    """Numbers of requests: their place in the session, or the id of a request that has none.

    Keeps 16 bytes per session.
    """

    def __init__(self) -> None:
        self._sessions: Ints = np.zeros(0, np.int64)
        self._counts: Ints = np.zeros(0, np.int64)

    def of(self, session: Ints, request_id: Ints) -> Ints:
        """Returns the numbers of the next requests in the order of their ids. session: -1: none."""
        has_session = session >= 0
        if not has_session.any():
            return request_id
        places = pd.Series(session).groupby(session).cumcount().to_numpy(np.int64)
        found, at, added = np.unique(session[has_session], return_inverse=True, return_counts=True)
        sessions = np.union1d(self._sessions, found)
        counts = np.zeros(len(sessions), np.int64)
        counts[np.searchsorted(sessions, self._sessions)] = self._counts
        own = np.searchsorted(sessions, found)
        numbers = request_id.copy()
        numbers[has_session] = places[has_session] + counts[own][at]
        counts[own] += added
        self._sessions, self._counts = sessions, counts
        return numbers
