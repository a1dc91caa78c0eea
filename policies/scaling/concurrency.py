"""Concurrency: keeps the requests in flight per replica at a target, as Knative's autoscaler (KServe) does.

    wanted = ceil(mean requests in flight / (target_concurrency * target_utilisation))

The mean is computed over a stable window of 60 s and over a panic window of 6 s. If the panic window wants at
least twice the serving replicas, it is used until there has been no panic for a stable window, and no replica
is removed in this time. Queued requests are in flight, too. With 100 requests in flight, a target of 10 and a
utilisation of 70 %, 15 replicas are wanted. Defaults are Knative's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import ceil
from typing import Annotated

from fieldlimits import Gt, Positive, PositiveShare, Unit
from policies.scaling import PoolView
from policies.scaling.bounds import Paced


@dataclass(kw_only=True, slots=True)
class Concurrency(Paced):
    """Scales by concurrency. Stores the requests in flight of one stable window. Does not scale to zero."""

    interval_s: float = 2.0
    target_concurrency: Annotated[Positive, Unit("requests")] = 100.0
    """Number of requests in flight that one replica can serve."""
    target_utilisation: PositiveShare = 0.7
    """Share of target_concurrency that each replica should have."""
    stable_window_s: Annotated[Positive, Unit("s")] = 60.0
    panic_window_s: Annotated[Positive, Unit("s")] = 6.0
    panic_threshold: Annotated[float, Gt(1)] = 2.0
    """Ratio of the replicas wanted by the panic window to the serving ones at which a panic begins."""
    max_scale_up_rate: Annotated[float, Gt(1)] = 1000.0
    """Maximum factor on the serving replicas in one decision."""
    max_scale_down_rate: Annotated[float, Gt(1)] = 2.0
    """Maximum divisor of the serving replicas in one decision."""
    _samples: deque[tuple[float, int]] = field(default_factory=deque, init=False, repr=False, compare=False)
    _panic_s: float | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        Paced.__post_init__(self)
        if not self.panic_window_s <= self.stable_window_s:
            raise ValueError(
                f"panic_window_s={self.panic_window_s}: must be <= stable_window_s={self.stable_window_s} s"
            )

    def target(self, pool: PoolView, now: float) -> int:
        """Returns the number for the stable window; in a panic the maximum of both windows so far."""
        self._samples.append((now, pool.num_outstanding))
        while self._samples[0][0] <= now - self.stable_window_s:
            self._samples.popleft()
        num_up = max(pool.num_replicas, 1)
        fewest, most = int(num_up / self.max_scale_down_rate), ceil(num_up * self.max_scale_up_rate)
        stable = max(fewest, min(most, self._wanted(self.stable_window_s, now)))
        panic = max(fewest, min(most, self._wanted(self.panic_window_s, now)))
        if panic / num_up >= self.panic_threshold:
            self._panic_s = now
        elif self._panic_s is not None and now - self._panic_s > self.stable_window_s:
            self._panic_s = None
        if self._panic_s is None:
            return self.paced(stable, pool, now)
        return self.paced(max(stable, panic, self.asked(pool)), pool, now)

    def _wanted(self, window_s: float, now: float) -> int:
        """Returns the number of replicas for the mean of a window."""
        counts = [count for time_s, count in self._samples if time_s > now - window_s]
        mean = sum(counts) / len(counts)
        return ceil(mean / (self.target_concurrency * self.target_utilisation) - 1e-9)
