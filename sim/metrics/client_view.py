"""Figures of what clients see: time to publish, and whether tokens come as fast as users read.

A user begins to read when the first token is published and reads r tokens/s. Token j (from 0) is published at
a_j, and read at the earliest at max over i <= j of (a_i + (j - i) / r). The stalls of an output sum to
max over j of (a_j - j / r) - a_0; without a stall, the output is never slower than reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.metrics.definitions import describe
from sim.metrics.sums import TableTotals, Totals
from sim.metrics.token_times import TokenTimes
from sim.metrics.workload_records import WorkloadRecords

ROUNDING_S = 1e-9
"""Stall that is an error of rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientView:
    """View of the clients of a run. hidden_tokens: one per request, in the order of the request table."""

    hidden_tokens: NDArray[np.int64]
    streams: bool = True
    moderation_s: float = 0.0
    reading_tokens_per_s: float | None = None
    publish_slo_s: float | None = None


class ClientTimes(NamedTuple):
    """Times that clients see, of the requests that arrived in the window; each array has one per request.

    published_in_slo: whether it finished and was published within the limit; None: there is no limit.
    stall_s: the time for which its reader waits; None: it is not compared.
    """

    publish_s: NDArray[np.float64]
    finished: NDArray[np.bool_]
    hidden_tokens: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    published_in_slo: NDArray[np.bool_] | None
    stall_s: NDArray[np.float64] | None

    @property
    def never_slower(self) -> NDArray[np.bool_]:
        """Returns which requests finished with their tokens as fast as they are read, or faster."""
        assert self.stall_s is not None
        return self.finished & (self.stall_s <= ROUNDING_S)


def client_times(records: WorkloadRecords, view: ClientView) -> ClientTimes | None:
    """Computes what clients see; None if a request has several samples, whose times are not known."""
    times = records.token_times()
    if times is None:
        return None
    arrival_s = records.requests["arrival_s"].to_numpy(np.float64)
    finished = (records.requests["status"] == "finished").to_numpy(np.bool_)
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


def client_figures(records: WorkloadRecords, view: ClientView) -> dict[str, Any]:
    """Computes the sections `publish` and `clients` of the summary, for requests that arrived in the window.

    Both are None if a request has several samples, because the times of their tokens are not known.
    """
    seen = client_times(records, view)
    if seen is None:
        return {"publish": None, "clients": None}
    totals = TableTotals()
    add_client_times(totals, seen)
    stall = None if seen.stall_s is None else describe(seen.stall_s[seen.finished])
    return client_sections(totals, describe(seen.publish_s), stall, view)


def add_client_times(totals: Totals, seen: ClientTimes) -> None:
    """Adds the counts of `client_sections`."""
    totals.add("client_requests", np.ones(len(seen.finished), np.bool_))
    totals.add("hidden_tokens", seen.hidden_tokens)
    totals.add("client_tokens", seen.num_tokens)
    if seen.published_in_slo is not None:
        totals.add("published_in_slo", seen.published_in_slo)
    if seen.stall_s is not None:
        totals.add("never_slower", seen.never_slower)


def client_sections(
    totals: Totals,
    publish: Mapping[str, float | int],
    stall: Mapping[str, float | int] | None,
    view: ClientView,
) -> dict[str, Any]:
    """Returns the sections `publish` and `clients` from counts and from the statistics of the times.

    stall: of finished requests; None: the speed of reading is not compared.
    """
    count, tokens = totals["client_requests"], totals["client_tokens"]
    reading = None
    if stall is not None:
        reading = {
            "tokens_per_s": view.reading_tokens_per_s,
            "never_slower_share": totals["never_slower"] / count if count else None,
            "stall": dict(stall),
        }
    has_limit = view.publish_slo_s is not None and count
    return {
        "publish": dict(publish),
        "clients": {
            "streams": view.streams,
            "moderation_s": view.moderation_s,
            "hidden_share": totals["hidden_tokens"] / tokens if tokens else None,
            "publish_slo_s": view.publish_slo_s,
            "publish_slo_share": totals["published_in_slo"] / count if has_limit else None,
            "reading": reading,
        },
    }


def publish_times_s(records: WorkloadRecords, view: ClientView) -> NDArray[np.float64]:
    """Computes the time to publish of each request, in seconds; NaN if it is not published.

    Raises ValueError if a request has several samples.
    """
    times = records.token_times()
    if times is None:
        raise ValueError("the time to publish of requests with several samples is not known")
    finished = (records.requests["status"] == "finished").to_numpy(np.bool_)
    arrival_s = records.requests["arrival_s"].to_numpy(np.float64)
    seconds: NDArray[np.float64] = published_s(times, view, finished) - arrival_s
    return seconds


def published_s(times: TokenTimes, view: ClientView, finished: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Computes the time at which each request's first visible token is published; NaN if it is not."""
    found = np.full(len(times.num_tokens), np.nan)
    if view.streams:
        begun = times.num_tokens > 0
        found[begun] = times.time_s[(times.first + view.hidden_tokens)[begun]]
    else:
        done = finished & (times.num_tokens > 0)
        found[done] = times.time_s[(times.first + times.num_tokens - 1)[done]]
    return found + view.moderation_s


def stalls_s(times: TokenTimes, view: ClientView) -> NDArray[np.float64]:
    """Computes the time for which each request's reader waits; NaN for requests without a token."""
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
