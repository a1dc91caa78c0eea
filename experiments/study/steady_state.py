"""Decides whether a run shows the steady state of a service at its rate, so that its figures hold there.

Traffic that ends before a backlog can build up, or sessions that all begin at once, put a load on the service
that has little to do with the nominal rate: the same 50 requests are met at any rate, however high. A run
shows a steady state if

- the traffic lasts `ANSWERS` times the p90 of E2E; of sessions only the part counts in which about as many
  end as begin: before it, those that have begun have not sent all of their requests, and the load is lower;
- it has enough requests for the target of the SLO (`MISSES`);
- latencies have settled (MSER-5, `sim.metrics.steady`), or at least do not grow: the slope of the means of
  `PARTS` equal parts is not significantly above 0 (t-test, 95 %).
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, floor, inf, log2, log10, sqrt
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.metrics.confidence import student_t
from sim.metrics.steady import SERIES, find_warm_up

ANSWERS = 10
"""Least duration of the traffic over its p90 E2E latency; shorter traffic ends before a backlog builds up."""
DRAIN = 0.05
"""Largest share of a run after the last arrival; goodput counts this time, although no request arrives."""
MISSES = 10
"""Least number of requests that may miss the SLO; with fewer, single requests decide whether it is met."""

REASONS = {
    "backlog": f"the traffic lasts less than {ANSWERS} times the p90 of E2E, so an overload may not show",
    "drain": f"more than {100 * DRAIN:g} % of the run comes after the last arrival, which lowers goodput",
    "share": f"the target allows fewer than {MISSES} requests to miss the SLO, so single requests decide",
}
"""Reason why a run is too short -> its text."""

PARTS = 8
LEAST_REQUESTS = 100
"""Fewest requests from which the end of the warm-up can be told."""
LONGER = (1.5, 8.0)
"""Least and largest factor by which the traffic of a run without a steady state is made longer."""
GROWTH = 0.1
"""Growth of a latency over the traffic, relative to its mean, that counts as none."""
SENT = 0.98
"""Share of the load of sessions from which on it counts as that of a steady state. t seconds after the first
session began, it is the share of all computed prompt tokens whose request ends within t seconds of the begin
of its session. Late turns are long: of chats of four turns on average, on four H100 near their limit, 90 % of
the requests end within 220 s and 98 % of the tokens within 520 s."""


def requests_needed(
    num_requests: int, *, lasts_s: float, ends_s: float, e2e_p90_s: float, target: float
) -> dict[str, int]:
    """Returns reason -> least number of requests at this rate, for the reasons that ask for more requests.

    lasts_s, ends_s: time of the last arrival and of the end of the run; target: share of the requests that
    must meet the SLO. The numbers are rounded up to two digits.
    1,000 requests in 100 s with a p90 of 20 s must last 200 s, so 2,000 are needed; if the run ends after
    110 s, the last 10 s may be 5 % of 200 s, so 1,900 are needed; a target of 99.9 % needs 10,000.
    """
    rate_per_s, drain_s = num_requests / lasts_s, max(0.0, ends_s - lasts_s)
    needed = {
        "backlog": ANSWERS * e2e_p90_s * rate_per_s,
        "drain": drain_s * (1 - DRAIN) / DRAIN * rate_per_s,
        "share": MISSES / (1 - target) if target < 1 else 0.0,
    }
    return {reason: _rounded_up(least) for reason, least in needed.items() if least > 1.0001 * num_requests}


def _rounded_up(value: float) -> int:
    unit = int(10 ** max(0, floor(log10(value)) - 1))
    return unit * ceil(round(value / unit, 6))


class Lack(NamedTuple):
    """Why a run does not show a steady state."""

    reason: str
    times: float
    """How many times as long the traffic would have to be, as far as the run tells."""

    def requests(self, num_requests: int) -> int:
        """Returns how many requests to try next, of a run with num_requests.

        They are a power of the square root of two, so that runs of similar rates have the same requests.
        """
        least, most = LONGER
        return stepped(num_requests * min(max(self.times, least), most))


class Measured(Protocol):
    """Figures of a run, as far as they say whether it shows a steady state."""

    @property
    def num_requests(self) -> int: ...

    @property
    def lack(self) -> Lack | None: ...


M = TypeVar("M", bound=Measured)


def steady_run(
    run: Callable[[int | None], M], num_requests: int | None, most: int, attains: Callable[[M], bool]
) -> M:
    """Runs with more and more requests until a run shows a steady state, misses the SLO, or has the most.

    run: makes a run with so many requests; None: with those of its workload. num_requests: of the first run.
    """
    while True:
        found = run(num_requests)
        asked = found.num_requests if num_requests is None else num_requests
        has_all = asked >= most or found.num_requests < 0.9 * asked
        if found.lack is None or has_all or not attains(found):
            return found
        num_requests = min(most, found.lack.requests(found.num_requests))


class Steady(NamedTuple):
    """The part of a run whose requests are those of a steady state, if there is one."""

    start_s: float
    end_s: float

    def holds(self, arrival_s: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Returns which requests arrived in it."""
        return (arrival_s >= self.start_s) & (arrival_s <= self.end_s)


def steady_part(requests: pd.DataFrame, last_begin_s: float, *, has_sessions: bool) -> Steady:
    """Returns the part of the traffic from the time when sessions also end, to the last begin.

    requests: `request_metrics`; last_begin_s: arrival of the last request, or of the last session's first.
    """
    if not has_sessions:
        return Steady(0.0, last_begin_s)
    return Steady(min(_filled_s(requests), last_begin_s), last_begin_s)


def needed_s(requests: pd.DataFrame, *, has_sessions: bool) -> float:
    """Returns how many seconds the traffic of a run lasts at least if it shows a steady state."""
    known_s = requests["e2e_s"].dropna()
    e2e_s = float(known_s.quantile(0.9)) if len(known_s) else 0.0
    return (_filled_s(requests) if has_sessions else 0.0) + ANSWERS * e2e_s


def lack_of(requests: pd.DataFrame, last_begin_s: float, *, has_sessions: bool, target: float) -> Lack | None:
    """Returns why a run does not show a steady state; None if it does.

    requests, last_begin_s: see `steady_part`; target: share of the requests that must meet the SLO.
    """
    least_s = needed_s(requests, has_sessions=has_sessions)
    arrival_s = requests["arrival_s"].to_numpy(np.float64)
    part = steady_part(requests, last_begin_s, has_sessions=has_sessions)
    held = requests[part.holds(arrival_s)]
    lasts_s = max(last_begin_s, 1e-9)
    if last_begin_s < least_s:
        what = f"{ANSWERS} times the p90 of E2E ({least_s:.3g} s)"
        if has_sessions:
            what = f"a session and {what}"
        return Lack(f"its traffic lasts {lasts_s:.3g} s, less than {what}", least_s / lasts_s)
    least = max(LEAST_REQUESTS, MISSES / (1 - target) if target < 1 else 0.0)
    if len(held) < least * 0.999:
        reason = f"it measures {len(held):,} requests, fewer than the {least:,.0f} that its target needs"
        return Lack(reason, least / len(held) if len(held) else inf)
    if find_warm_up(held).evidence["settled"]:
        return None
    ordered = held.sort_values("arrival_s", kind="stable")
    for name in SERIES:
        if _grows(ordered[f"{name}_s"].to_numpy(np.float64)):
            return Lack(f"{name.upper()} still grows at its end", 2.0)
    return None


def stepped(number: float) -> int:
    """Rounds up to a power of the square root of two."""
    return ceil(2 ** (ceil(2 * log2(number)) / 2))


def _filled_s(requests: pd.DataFrame) -> float:
    """Returns the seconds from the first session on after which the load is `SENT` of the whole."""
    begins_s = requests.groupby("session_id")["arrival_s"].transform("min")
    ages_s = (requests["finished_s"] - begins_s).dropna().sort_values(kind="stable")
    if ages_s.empty:
        return 0.0
    computed = (requests["prompt_tokens"] - requests["cached_tokens"]).loc[ages_s.index].to_numpy(np.float64)
    sent = np.cumsum(computed)
    return float(ages_s.iloc[min(np.searchsorted(sent, SENT * sent[-1]), len(sent) - 1)])


def _grows(values: NDArray[np.float64]) -> bool:
    """Tests whether the means of equal parts, in order of time, rise significantly and noticeably."""
    known = values[~np.isnan(values)]
    length = len(known) // PARTS
    if not length:
        return False
    means = known[len(known) - PARTS * length :].reshape(PARTS, length).mean(axis=1)
    places = np.arange(PARTS) - (PARTS - 1) / 2
    spread = float((places**2).sum())
    slope = float(places @ means) / spread
    if slope * PARTS <= GROWTH * float(means.mean()):
        return False
    rest = means - means.mean() - slope * places
    error = sqrt(float((rest**2).sum()) / (PARTS - 2) / spread)
    return slope > student_t(PARTS - 2, 0.95) * error
