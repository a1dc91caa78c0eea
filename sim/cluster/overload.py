"""Detects overload: a backlog that grows without bound, because more requests arrive than can be served.

Beyond saturation the backlog grows for as long as the traffic lasts, and so do all latencies: they measure
the length of the run, not the service. The test counts arrivals and ends of requests at times that grow by a
twelfth of a doubling, and takes the second half of the time so far. The service is overloaded if

- more requests arrived than ended in its twelve parts, beyond what their spread explains (t-test, 99.9 %);
- it is long against the service time of a request (twice the 95th percentile of first work to end), so that
  a service which only fills at its beginning does not count as overloaded;
- enough requests ended (`MIN_ENDED`) to know the rate.

The test is for open-loop traffic of a steady rate: closed-loop users cannot overload a service without bound,
and a peak of the day ends. Source of the idea: the over-saturation stop of guidellm, which tests
the slope of concurrency and of TTFT.
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
    """Number of requests that have arrived and that have ended, at a time in seconds."""

    at_s: float
    arrived: int
    ended: int


def is_past_filling(growing: Overload, served_s: NDArray[np.float64]) -> bool:
    """Whether the time tested is long against the service time of requests.

    served_s: seconds from first work to end, NaN for requests that have not ended.
    """
    known_s = served_s[~np.isnan(served_s)]
    if len(known_s) < MIN_ENDED:
        return False
    return growing.at_s - growing.since_s >= SERVICE_TIMES * float(np.percentile(known_s, 95))


def overload_of(
    arrival_s: NDArray[np.float64], scheduled_s: NDArray[np.float64], ended_s: NDArray[np.float64]
) -> Overload | None:
    """The evidence of overload of a run that was not stopped, from the time until its last arrival.

    All [N]; NaN: never. None if the backlog may have grown by chance, or only to fill the service.
    """
    last_s = float(arrival_s.max(initial=0.0))
    counts, moment = [Count(0.0, 0, 0)], FIRST_S
    while moment <= last_s:
        counts.append(Count(moment, int((arrival_s <= moment).sum()), int((ended_s <= moment).sum())))
        moment = FIRST_S * 2 ** ((len(counts) - 1) / PARTS)
    growing = backlog_growth(counts)
    if growing is None:
        return None
    served_s = np.where(ended_s <= growing.at_s, ended_s - scheduled_s, np.nan)
    return growing if is_past_filling(growing, served_s) else None


def backlog_growth(counts: Sequence[Count]) -> Overload | None:
    """The evidence that the backlog grows in the second half of the time; None if it may be chance."""
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
    # Parts are of unequal lengths: longer ones know their rate better, in proportion.
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
