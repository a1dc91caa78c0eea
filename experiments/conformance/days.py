"""Worlds for autoscalers: days of a pool with fluid traffic, replicas of known capacity, and cold starts.

A given amount of work arrives in each interval. Running replicas serve at most capacity_per_s each, and the
rest waits. If more replicas are wanted, new ones start and run cold_start_s later; if fewer are wanted,
replicas leave at once, starting ones first.
"""

from __future__ import annotations

import warnings
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hypothesis import strategies as st


@dataclass(kw_only=True)
class FluidPool:
    """`policies.scaling.PoolView` with fluid traffic.

    A request takes service_s, and meets the SLO if it waits for at most 1 s.
    """

    num_replicas: int
    capacity_per_s: float
    service_s: float
    num_draining: int = 0
    cold_start_s: float = 0.0
    ready_s: list[float] = field(default_factory=list)
    """Times at which the starting replicas run, in seconds."""
    waiting: float = 0.0
    served_per_s: float = 0.0
    arrived: float = 0.0
    ended: float = 0.0
    met: float = 0.0

    def advance(self, rate_per_s: float, now: float, elapsed_s: float) -> None:
        """Advances the pool by elapsed_s to the time `now`, both in seconds."""
        most = self.num_replicas * self.capacity_per_s * elapsed_s
        work = self.waiting + rate_per_s * elapsed_s
        served = min(work, most)
        in_time = self.waiting <= self.num_replicas * self.capacity_per_s
        self.waiting = work - served
        self.served_per_s = served / elapsed_s
        self.arrived += rate_per_s * elapsed_s
        self.ended += served
        self.met += served if in_time else 0.0
        self.num_replicas += sum(ready_s <= now for ready_s in self.ready_s)
        self.ready_s = [ready_s for ready_s in self.ready_s if ready_s > now]

    def resize(self, wanted: int, ready_s: float) -> None:
        """Starts missing replicas, which run at ready_s, or removes surplus ones."""
        present = self.num_replicas + self.num_starting
        self.ready_s += [ready_s] * (wanted - present)
        num_not_started = min(max(present - wanted, 0), self.num_starting)
        self.ready_s = self.ready_s[: self.num_starting - num_not_started]
        self.num_replicas = min(self.num_replicas, wanted)

    @property
    def num_starting(self) -> int:
        return len(self.ready_s)

    @property
    def max_concurrency(self) -> int:
        return max(1, round(self.capacity_per_s * self.service_s))

    @property
    def num_running(self) -> int:
        return round(self.served_per_s * self.service_s)

    @property
    def num_waiting(self) -> int:
        return round(self.waiting)

    @property
    def num_outstanding(self) -> int:
        return self.num_running + self.num_waiting

    @property
    def num_outstanding_tokens(self) -> int:
        return 100 * self.num_outstanding

    @property
    def busy_share(self) -> float:
        return min(1.0, self.served_per_s / (self.num_replicas * self.capacity_per_s))

    @property
    def kv_usage(self) -> float:
        return self.busy_share

    @property
    def num_arrivals(self) -> int:
        return round(self.arrived)

    @property
    def num_arrived_tokens(self) -> int:
        return 100 * self.num_arrivals

    @property
    def num_ended(self) -> int:
        return round(self.ended)

    @property
    def num_met(self) -> int:
        return round(self.met)


class Asked(NamedTuple):
    """State of the pool at a decision of an autoscaler, and its target number of replicas."""

    now: float
    num_replicas: int
    num_starting: int
    num_waiting: int
    target: Any


@dataclass(frozen=True, kw_only=True)
class Day:
    """Settings of a pool under an autoscaler; `simulate` starts from the beginning at every call."""

    scaling: Any
    rates_per_s: tuple[float, ...]
    """Arrivals per second in each interval, repeated until num_intervals."""
    num_intervals: int
    capacity_per_s: float = 1.0
    """Requests per second that one replica serves."""
    service_s: float = 10.0
    cold_start_s: float = 60.0
    num_replicas: int = 1
    """Number of replicas at the beginning."""

    def simulate(self) -> list[Asked]:
        """Asks the autoscaler after every interval and resizes the pool; returns all decisions."""
        scaling = deepcopy(self.scaling)
        pool = FluidPool(
            num_replicas=self.num_replicas,
            capacity_per_s=self.capacity_per_s,
            service_s=self.service_s,
            cold_start_s=self.cold_start_s,
        )
        asked: list[Asked] = []
        for index in range(self.num_intervals):
            now = (index + 1) * scaling.interval_s
            pool.advance(self.rates_per_s[index % len(self.rates_per_s)], now, scaling.interval_s)
            target = scaling.target(pool, now)
            asked.append(Asked(now, pool.num_replicas, pool.num_starting, pool.num_waiting, target))
            pool.resize(max(1, int(target)), now + self.cold_start_s)
        return asked

    def live(self) -> list[Asked]:
        """Calls `simulate`; the old name is kept for one version."""
        warnings.warn("Day.live is deprecated: use Day.simulate", DeprecationWarning, stacklevel=2)
        return self.simulate()


@st.composite
def draw_days(draw: st.DrawFn, scaling: Any) -> Day:
    """Draws a day of an autoscaler of up to 60 intervals, from idle to far above the capacity."""
    return Day(
        scaling=scaling,
        rates_per_s=tuple(draw(st.lists(st.integers(0, 40).map(lambda n: n / 4), min_size=1, max_size=8))),
        num_intervals=draw(st.integers(1, 60)),
        capacity_per_s=draw(st.sampled_from([0.25, 1.0, 4.0])),
        service_s=draw(st.sampled_from([4.0, 64.0])),
        cold_start_s=draw(st.integers(0, 10)) * scaling.interval_s / 2,
        num_replicas=draw(st.integers(1, 10)),
    )
