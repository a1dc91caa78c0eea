"""Decides whether a run has enough requests to judge goodput and SLO attainment."""

from __future__ import annotations

from math import ceil, floor, log10

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
