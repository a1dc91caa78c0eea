"""Early stops of a run: when the service is overloaded, or when its SLO can no longer be attained.

`OverloadStop` applies the test for overload (`overload_of`) during the run.

`MissedSloStop` counts requests that are certain to miss the SLO: finished outside a limit, without a first
token after the TTFT limit, or unfinished after the E2E limit. Of N requests, floor((1 - target) N) may miss;
they are counted 400 times while requests arrive. Once more than that are certain to miss, no later request
can change the outcome. The verdict is exact: a run stopped here would have missed the SLO. A count that
cannot stop the run is skipped.

Overload is a backlog that grows without bound, because more requests arrive than can be served. Beyond
saturation the backlog and all latencies grow as long as the traffic lasts: they measure the length of the
run, not the service. The test counts arrivals and ends of requests at times that grow by a factor of
2^(1/12), and uses the second half of the time so far. The service is overloaded if

- in its twelve parts significantly more requests arrived than ended (t-test, 99.9 %);
- the second half is long compared with the service time of a request (at least twice the 95th percentile of
the time from
  first work to end), so that a service that is only filling up does not count as overloaded;
- enough requests ended (`MIN_ENDED`) to estimate the rate.

The test is for open-loop traffic with a steady rate: closed-loop users cannot overload a service without
bound, and a daily peak ends. Source of the idea: the over-saturation stop of guidellm, which tests the slopes
of concurrency and of TTFT.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from simpy.events import ProcessGenerator

from sim.engine.clock import Clock, Phase
from sim.metrics.confidence import student_t
from sim.metrics.slo import Slo
from sim.records.requests import RequestLog, Status
from sim.records.run import MissedSlo, Overload

NUM_COUNTS = 400
"""Number of times that missed requests are counted while requests arrive; the interval is constant."""
MIN_INTERVAL_S = 0.05


class OverloadStop:
    """Stops the clock of a run once the service is overloaded; the evidence is then in `found`.

    requests_remain: returns whether requests are in progress or still to arrive.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        requests: RequestLog,
        num_ended: Callable[[], int],
        requests_remain: Callable[[], bool],
    ) -> None:
        self.found: Overload | None = None
        self._clock = clock
        self._requests = requests
        self._num_ended = num_ended
        self._requests_remain = requests_remain
        self._counts = [Count(0.0, 0, 0)]
        clock.begin(self._check_in_turn())

    def _check_in_turn(self) -> ProcessGenerator:
        """Checks repeatedly until no requests remain or the run is stopped."""
        while self.found is None:
            yield self._clock.at(FIRST_S * 2 ** ((len(self._counts) - 1) / PARTS), Phase.control)
            if not self._requests_remain():
                return
            self._check()

    def _check(self) -> None:
        self._counts.append(Count(self._clock.now, sum(self._requests.has_arrived), self._num_ended()))
        growing = backlog_growth(self._counts)
        if growing is not None and self._is_past_filling(growing):
            self.found = growing
            self._clock.stop()

    def _is_past_filling(self, growing: Overload) -> bool:
        served_s = np.array(self._requests.finished_s) - np.array(self._requests.scheduled_s)
        return is_past_filling(growing, served_s)


class MissedSloStop:
    """Stops the clock of a run once the SLO is out of reach; `found` then has the evidence.

    num_requests: number of requests of the whole run; the last one arrives at last_arrival_s, in seconds.
    requests_remain: returns whether requests are in progress or still to arrive.
    """

    def __init__(
        self,
        *,
        slo: Slo,
        num_requests: int,
        last_arrival_s: float,
        clock: Clock,
        requests: RequestLog,
        requests_remain: Callable[[], bool],
    ) -> None:
        self.found: MissedSlo | None = None
        self._slo = slo
        self._num_requests = num_requests
        self._allowed = most_missed(num_requests, slo.attainment_target)
        self._interval_s = max(last_arrival_s / NUM_COUNTS, MIN_INTERVAL_S)
        self._clock = clock
        self._requests = requests
        self._requests_remain = requests_remain
        self._num_attained = 0  # at the last count; they never miss it later
        clock.begin(self._check_in_turn())

    def _check_in_turn(self) -> ProcessGenerator:
        """Counts repeatedly until no requests remain or the run is stopped."""
        for number in count(1):
            yield self._clock.at(number * self._interval_s, Phase.control)
            if not self._requests_remain():
                return
            missed = self._num_missed()
            if missed > self._allowed:
                self.found = MissedSlo(self._clock.now, missed, self._allowed, self._num_requests)
                self._clock.stop()
                return

    def _num_missed(self) -> int:
        """Returns how many requests are certain to miss the SLO; 0, uncounted, if too few could miss it."""
        if self._requests.has_arrived.count(True) - self._num_attained <= self._allowed:
            return 0
        missed, self._num_attained = verdicts(self._requests, self._slo, self._clock.now)
        return missed


def most_missed(num_requests: int, target: float) -> int:
    """Returns how many requests may miss the SLO: 1 of 15 at a target of 0.9, because 14 must attain it."""
    return num_requests - math.ceil(target * num_requests * (1 - 1e-12))


class Verdicts(NamedTuple):
    """Numbers of requests that have certainly missed or attained the SLO."""

    missed: int
    attained: int


def verdicts(requests: RequestLog, slo: Slo, now: float) -> Verdicts:
    """Returns how many requests have certainly missed or attained the SLO at `now` (in seconds)."""
    has_arrived = np.array(requests.has_arrived, dtype=np.bool_)
    columns: dict[str, NDArray[Any]] = {
        name: np.array(getattr(requests, name))[has_arrived]
        for name in ("arrival_s", "first_token_s", "last_token_s", "longest_tokens", "status")
    }
    arrival_s, first_s, last_s, tokens, status = columns.values()
    is_finished, waits = status == Status.finished, np.isnan(first_s)
    limits_s = slo.limits_s
    ttft_s, tpot_s, e2e_s = (limits_s.get(term, math.inf) for term in ("ttft", "tpot", "e2e"))
    gaps = np.maximum(tokens - 1, 1)
    with np.errstate(invalid="ignore"):
        missed = waits & (now - arrival_s > ttft_s)
        missed |= ~is_finished & (now - arrival_s > e2e_s)
        missed |= ~waits & (first_s - arrival_s > ttft_s)
        missed |= is_finished & (tokens > 1) & ((last_s - first_s) / gaps > tpot_s)
        missed |= is_finished & (last_s - arrival_s > e2e_s)
    return Verdicts(missed=int(missed.sum()), attained=int((is_finished & ~missed).sum()))


FIRST_S = 10.0
PARTS = 12
"""Number of parts of the second half of a run so far."""
LEVEL = 0.999
MIN_ENDED = 50
SERVICE_TIMES = 2.0
"""Minimum length of the second half, in service times of a request."""


class Count(NamedTuple):
    """Numbers of arrived and ended requests at a time in seconds."""

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
