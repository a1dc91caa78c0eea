"""When a run can no longer attain its SLO: the count, and the end of the run.

Of N requests, floor((1 - target) N) may miss. The watch looks at the requests 400 times while they arrive and
counts those that are certain to miss: finished outside a limit, without a first token beyond the TTFT's
limit, or unfinished beyond that of E2E. Once there are more than may be, whatever is still to come cannot
save the run. The verdict is exact: a run that is ended so would have missed the SLO.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.engine.clock import Clock, Phase
from sim.metrics.slo import Slo
from sim.records.requests import RequestLog, Status
from sim.records.run import Missed

LOOKS = 400
"""While requests arrive; later in the same steps."""
LEAST_STEP_S = 0.05


class MissedWatch:
    """Stops a run's clock once its SLO is out of reach; `found` says so then.

    num_requests: of the whole run, the last of which arrives at last_arrival_s. goes_on: whether requests are
    under way or to come.
    """

    def __init__(
        self,
        *,
        slo: Slo,
        num_requests: int,
        last_arrival_s: float,
        clock: Clock,
        requests: RequestLog,
        goes_on: Callable[[], bool],
    ) -> None:
        self.found: Missed | None = None
        self._slo = slo
        self._num_requests = num_requests
        self._allowed = most_missed(num_requests, slo.attainment_target)
        self._step_s = max(last_arrival_s / LOOKS, LEAST_STEP_S)
        self._clock = clock
        self._requests = requests
        self._goes_on = goes_on
        self._num_looks = 0
        self._expect()

    def _expect(self) -> None:
        self._num_looks += 1
        self._clock.at(self._num_looks * self._step_s, Phase.control, self._look)

    def _look(self, event: int) -> None:
        if not self._goes_on():
            return
        missed = num_missed(self._requests, self._slo, self._clock.now)
        if missed > self._allowed:
            self.found = Missed(self._clock.now, missed, self._allowed, self._num_requests)
            self._clock.stop()
        else:
            self._expect()


def most_missed(num_requests: int, target: float) -> int:
    """Of so many requests, those that may miss: 0.9 of 15: 13.5 must hold, so 14, and 1 may miss."""
    return num_requests - math.ceil(target * num_requests * (1 - 1e-12))


def num_missed(requests: RequestLog, slo: Slo, now: float) -> int:
    """Requests that have missed the SLO, whatever happens from now on."""
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
    return int(missed.sum())
