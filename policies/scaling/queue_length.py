"""Queue length: adds replicas while requests wait, removes one when the others have enough capacity.

vLLM's production stack scales on `vllm:num_requests_waiting` (KEDA). An empty queue does not show how much
capacity is left, so a rule that scales in on it alone oscillates under constant load. Here a replica is
removed only if no request has waited for calm_s and the running requests would use at most max_fill_share of
the slots and of the KV memory of the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import Annotated

from fieldlimits import NonNegative, Positive, PositiveShare, Unit
from policies.scaling import PoolView
from policies.scaling.bounds import Paced, num_present


@dataclass(kw_only=True, slots=True)
class QueueLength(Paced):
    """Scales by queue length; starting replicas count as present."""

    max_waiting: Annotated[Positive, Unit("requests")] = 5.0
    """Waiting requests per replica above which replicas are added."""
    calm_s: Annotated[NonNegative, Unit("s")] = 300.0
    """Time in seconds without waiting requests before a replica is removed, and between two removals."""
    max_fill_share: PositiveShare = 0.7
    """Maximum share of the slots and the KV memory of the remaining replicas after a removal."""
    max_step_out: int | None = 4
    _waited_s: float | None = field(default=None, init=False, repr=False, compare=False)

    def target(self, pool: PoolView, now: float) -> int:
        """Returns more replicas while requests wait, one fewer after a calm period, else the same number."""
        asked = self.asked(pool)
        if pool.num_waiting or self._waited_s is None:
            self._waited_s = now
        num_for_queue = ceil(pool.num_waiting / self.max_waiting - 1e-9)
        wanted = asked + max(0, num_for_queue - num_present(pool))
        if now - self._waited_s >= self.calm_s and not pool.num_starting and self._fits_in_fewer(pool):
            wanted = asked - 1
            self._waited_s = now
        return self.paced(wanted, pool, now)

    def _fits_in_fewer(self, pool: PoolView) -> bool:
        num_left = pool.num_replicas - 1
        if num_left < 1:
            return not pool.num_outstanding
        fits = pool.kv_usage * pool.num_replicas <= self.max_fill_share * num_left
        if pool.max_concurrency is not None:
            fits = fits and pool.num_running <= self.max_fill_share * num_left * pool.max_concurrency
        return fits
