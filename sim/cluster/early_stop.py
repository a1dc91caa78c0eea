"""Early stops of a run: when the service is overloaded, or when the SLO can no longer be attained.

`OverloadStop` applies the test of `sim.cluster.overload` during the run.

`MissedSloStop` counts requests that are certain to miss the SLO: finished outside a limit, without a first
token beyond the limit of TTFT, or unfinished beyond the limit of E2E. Of N requests, floor((1 - target) N)
may miss; they are counted 400 times while requests arrive. Once more than that are certain to miss, no later
request can change the outcome. The verdict is exact: a run that is stopped here would have missed the SLO.
A count that cannot stop the run is left out: all but a few of the requests so far attained the SLO before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from simpy.events import ProcessGenerator

from sim.cluster.overload import FIRST_S, PARTS, Count, backlog_growth, is_past_filling
from sim.engine.clock import Clock, Phase
from sim.metrics.slo import Slo
from sim.records.requests import RequestLog, Status
from sim.records.run import MissedSlo, Overload

NUM_COUNTS = 400
"""Number of times that missed requests are counted while requests arrive; the interval is constant."""
MIN_INTERVAL_S = 0.05


class OverloadStop:
    """Stops the clock of a run once the service is overloaded; `found` then has the evidence.

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
        """Checks again and again, until no requests remain or the run is stopped."""
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

    num_requests: number of requests of the whole run, the last of which arrives at last_arrival_s, in
    seconds. requests_remain: returns whether requests are in progress or still to arrive.
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
        """Counts again and again, until no requests remain or the run is stopped."""
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
        """Returns how many requests are certain to miss the SLO; 0, uncounted, if they cannot be too many."""
        if self._requests.has_arrived.count(True) - self._num_attained <= self._allowed:
            return 0
        missed, self._num_attained = verdicts(self._requests, self._slo, self._clock.now)
        return missed


def most_missed(num_requests: int, target: float) -> int:
    """Returns how many requests may miss the SLO: 1 of 15 at a target of 0.9, as 14 must attain it."""
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
