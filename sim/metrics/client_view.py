"""Figures of what clients see: time to publish, and whether tokens come as fast as users read.

A user begins to read when the first token is published and reads r tokens/s. Token j (from 0) is published at
a_j, and read at the earliest at max over i <= j of (a_i + (j - i) / r). The stalls of an output sum to
max over j of (a_j - j / r) - a_0; without a stall, the output is never slower than reading.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.metrics.definitions import describe
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


def client_figures(records: WorkloadRecords, view: ClientView) -> dict[str, Any]:
    """Computes the sections `publish` and `clients` of the summary, for requests that arrived in the window.

    Both are None if a request has several samples, because the times of their tokens are not known.
    """
    requests = records.requests
    times = records.token_times()
    if times is None:
        return {"publish": None, "clients": None}
    arrival_s = requests["arrival_s"].to_numpy(np.float64)
    finished = (requests["status"] == "finished").to_numpy(np.bool_)
    inside = records.window.holds(arrival_s)
    publish_s = published_s(times, view, finished) - arrival_s
    hidden, tokens = view.hidden_tokens[inside].sum(), times.num_tokens[inside].sum()
    slo_s, count = view.publish_slo_s, int(inside.sum())
    met = None if slo_s is None or not count else float((finished & (publish_s <= slo_s))[inside].mean())
    return {
        "publish": describe(publish_s[inside]),
        "clients": {
            "streams": view.streams,
            "moderation_s": view.moderation_s,
            "hidden_share": float(hidden / tokens) if tokens else None,
            "publish_slo_s": slo_s,
            "publish_slo_share": met,
            "reading": _reading(times, view, finished, inside),
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


def _reading(
    times: TokenTimes, view: ClientView, finished: NDArray[np.bool_], inside: NDArray[np.bool_]
) -> dict[str, Any] | None:
    if view.reading_tokens_per_s is None:
        return None
    stall_s = stalls_s(times, view)
    never_slower = finished & (stall_s <= ROUNDING_S)
    return {
        "tokens_per_s": view.reading_tokens_per_s,
        "never_slower_share": float(never_slower[inside].mean()) if inside.any() else None,
        "stall": describe(stall_s[inside & finished]),
    }
