"""When a service gets more than it can ever serve: the evidence, and the end of the run.

Beyond saturation the backlog grows for as long as the traffic lasts, and so do all latencies: they say how
long the run was, nothing of the service. The watch counts requests that came and that ended at times a
twelfth of an octave apart and asks, of the second half of all time so far,

- whether more came than ended in its twelve parts, beyond what their own spread explains (t-test, 99.9 %);
- whether it is long against the time that a request is served (twice the 95th percentile of first work to
  end), so that a service which only fills at its beginning is not called overloaded;
- whether enough ended (`MIN_ENDED`) to know the pace.

Users who wait for their answers cannot overload anything for ever, and a day's peak is over some time:
whoever simulates these should not ask. Source of the idea: the over-saturation stop of guidellm, which tests
the slope of concurrency and of TTFT.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.engine.clock import Clock, Phase
from sim.metrics.quantiles import student_t
from sim.records.requests import RequestLog
from sim.records.run import Overload

FIRST_S = 10.0
PARTS = 12
"""Of the second half of a run so far."""
LEVEL = 0.999
MIN_ENDED = 50
SERVICE_TIMES = 2.0
"""How many times as long as a request is served the second half must be."""


class Count(NamedTuple):
    """Requests until a moment."""

    at_s: float
    arrived: int
    ended: int


class OverloadWatch:
    """Stops a run's clock once its service is overloaded; `found` says so then.

    goes_on: whether requests are under way or to come.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        requests: RequestLog,
        num_ended: Callable[[], int],
        goes_on: Callable[[], bool],
    ) -> None:
        self.found: Overload | None = None
        self._clock = clock
        self._requests = requests
        self._num_ended = num_ended
        self._goes_on = goes_on
        self._counts = [Count(0.0, 0, 0)]
        self._expect()

    def _expect(self) -> None:
        at_s = FIRST_S * 2 ** ((len(self._counts) - 1) / PARTS)
        self._clock.at(at_s, Phase.control, self._look)

    def _look(self, event: int) -> None:
        if not self._goes_on():
            return
        self._counts.append(Count(self._clock.now, sum(self._requests.has_arrived), self._num_ended()))
        growing = growth(self._counts)
        if growing is not None and self._is_past_filling(growing):
            self.found = growing
            self._clock.stop()
        else:
            self._expect()

    def _is_past_filling(self, growing: Overload) -> bool:
        served_s = np.array(self._requests.finished_s) - np.array(self._requests.scheduled_s)
        return is_past_filling(growing, served_s)


def is_past_filling(growing: Overload, served_s: NDArray[np.float64]) -> bool:
    """Whether the time looked at is long against the time that requests are served.

    served_s: seconds from first work to end, NaN for requests that have not ended.
    """
    known_s = served_s[~np.isnan(served_s)]
    if len(known_s) < MIN_ENDED:
        return False
    return growing.at_s - growing.since_s >= SERVICE_TIMES * float(np.percentile(known_s, 95))


def overload_of(
    arrival_s: NDArray[np.float64], scheduled_s: NDArray[np.float64], ended_s: NDArray[np.float64]
) -> Overload | None:
    """The same evidence of a run that was not ended for it: of the time until its last arrival.

    All [N]; NaN: never. None if the backlog may have grown by chance, or only to fill the service.
    """
    last_s = float(arrival_s.max(initial=0.0))
    counts, moment = [Count(0.0, 0, 0)], FIRST_S
    while moment <= last_s:
        counts.append(Count(moment, int((arrival_s <= moment).sum()), int((ended_s <= moment).sum())))
        moment = FIRST_S * 2 ** ((len(counts) - 1) / PARTS)
    growing = growth(counts)
    if growing is None:
        return None
    served_s = np.where(ended_s <= growing.at_s, ended_s - scheduled_s, np.nan)
    return growing if is_past_filling(growing, served_s) else None


def growth(counts: Sequence[Count]) -> Overload | None:
    """The evidence that the backlog grows, of the second half of the time; None if it may be chance."""
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
