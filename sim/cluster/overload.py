"""Detects overload: a backlog that grows without bound, because more requests arrive than can be served.

Beyond saturation the backlog grows for as long as the traffic lasts, and so do all latencies: they measure
the length of the run, not the service. The test counts arrivals and ends of requests at times that grow by a
factor of 2^(1/12), and looks at the second half of the time so far. The service is overloaded if

- in its twelve parts significantly more requests arrived than ended (t-test, 99.9 %);
- it is long compared with the service time of a request (at least twice the 95th percentile of the time from
  first work to end), so that a service that is only filling up does not count as overloaded;
- enough requests ended (`MIN_ENDED`) to estimate the rate.

The test is for open-loop traffic of a steady rate: closed-loop users cannot overload a service without
bound, and a daily peak ends. Source of the idea: the over-saturation stop of guidellm, which tests the slopes
of concurrency and of TTFT.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.metrics.quantiles import student_t
from sim.records.run import Overload

FIRST_S = 10.0
PARTS = 12
"""Number of parts of the second half of a run so far."""
LEVEL = 0.999
MIN_ENDED = 50
SERVICE_TIMES = 2.0
"""Minimum length of the second half, in service times of a request."""


class Count(NamedTuple):
    """Numbers of requests that have arrived and that have ended by a time in seconds."""

    at_s: float
    arrived: int
    ended: int


def is_past_filling(growing: Overload, served_s: NDArray[np.float64]) -> bool:
    """Returns whether the tested time is long compared with the service time of requests.

    served_s: seconds from first work to end, NaN for requests that have not ended.
    """
    known_s = served_s[~np.isnan(served_s)]
    if len(known_s) < MIN_ENDED:
        return False
    return growing.at_s - growing.since_s >= SERVICE_TIMES * float(np.percentile(known_s, 95))


def overload_of(
    arrival_s: NDArray[np.float64], scheduled_s: NDArray[np.float64], ended_s: NDArray[np.float64]
) -> Overload | None:
    """Returns the evidence of overload of a complete run, from the time until its last arrival.

    Times of each request in seconds, [N]; NaN: never. None if the backlog may have grown by chance, or only
    because the service was filling up.
    """
    last_s = float(arrival_s.max(initial=0.0))
    counts, time_s = [Count(0.0, 0, 0)], FIRST_S
    while time_s <= last_s:
        counts.append(Count(time_s, int((arrival_s <= time_s).sum()), int((ended_s <= time_s).sum())))
        time_s = FIRST_S * 2 ** ((len(counts) - 1) / PARTS)
    growing = backlog_growth(counts)
    if growing is None:
        return None
    served_s = np.where(ended_s <= growing.at_s, ended_s - scheduled_s, np.nan)
    return growing if is_past_filling(growing, served_s) else None


def backlog_growth(counts: Sequence[Count]) -> Overload | None:
    """Returns the evidence that the backlog grew in the second half; None if it may be chance."""
    if len(counts) < PARTS + 2:
        return None
    recent = counts[-PARTS - 1 :]
    first, last = recent[0], recent[-1]
    duration_s = last.at_s - first.at_s
    if last.ended - first.ended < MIN_ENDED:
        return None
    at_s, arrived, ended = (np.array(column, np.float64) for column in zip(*recent, strict=True))
    lengths_s = np.diff(at_s)
    rates = np.diff(arrived - ended) / lengths_s
    # The parts have unequal lengths; the variance of a rate is inversely proportional to the length.
    weights = lengths_s / duration_s
    mean = float(np.dot(weights, rates))
    variance = float(np.dot(weights, (rates - mean) ** 2)) / (PARTS - 1)
    least = mean - student_t(PARTS - 1, LEVEL) * math.sqrt(variance)
    if least <= 0:
        return None
    return Overload(
        at_s=last.at_s,
        since_s=first.at_s,
        arrivals_per_s=(last.arrived - first.arrived) / duration_s,
        ends_per_s=(last.ended - first.ended) / duration_s,
        outstanding=last.arrived - last.ended,
        growth_per_s=mean,
        least_growth_per_s=least,
    )
