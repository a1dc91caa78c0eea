"""Queue length: adds replicas while requests wait, removes one when the others have enough capacity.

vLLM's production stack scales on `vllm:num_requests_waiting` (KEDA). An empty queue does not show how much
capacity is left, so a rule that scales in on it alone oscillates under constant load. Here a replica is
removed only if no request has waited for calm_s and the running requests would use at most max_fill_share of
the slots and of the KV memory of the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

from policies.scaling import PoolView
from policies.scaling.bounds import num_present, require_not_negative, require_positive, require_share
from policies.scaling.pace import Paced


@dataclass(kw_only=True, slots=True)
class QueueLength(Paced):
    """Scales by queue length; starting replicas count as present."""

    max_waiting: float = 5.0
    """Waiting requests per replica above which replicas are added."""
    calm_s: float = 300.0
    """Time in seconds without waiting requests before a replica is removed, and between two removals."""
    max_fill_share: float = 0.7
    """Maximum share of the slots and the KV memory of the remaining replicas after a removal."""
    max_step_out: int | None = 4
    _waited_s: float | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        Paced.__post_init__(self)
        require_positive(self, "max_waiting", unit="requests")
        require_not_negative(self, "calm_s", unit="s")
        require_share(self, "max_fill_share")

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
