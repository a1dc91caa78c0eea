"""A scaling policy: how many replicas a pool has. Say here what it does, and after which paper.

It sees: what PoolView has, of this very instant: replicas up, starting and draining, requests running,
waiting and outstanding, shares of KV memory and of busy time, and counts since the run began (arrivals, ends,
SLOs met): whoever wants rates remembers what they were.
It never sees what is to come, nor how long a replica takes to start.
It may: say how many replicas there should be, and remember.
It must promise: a whole number from min_replicas to max_replicas, and the same one for the same pool: no
clock but `now`, no random numbers. A replica that has crashed and will be back is wanted still.

Memory pressure: not its business. Horizon: it is asked every interval_s.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf

from policies.scaling import PoolView
from policies.scaling.pace import Paced


@dataclass(kw_only=True, slots=True)
class MyPolicy(Paced):
    """So many outstanding requests a replica, with the pace that `Paced` has settings for."""

    # Settings are the fields, with their defaults. What a policy remembers is a field, too:
    # field(init=False, default_factory=dict, repr=False, compare=False).
    stabilisation_s: float = 120.0
    max_outstanding: float = 32.0
    """Requests that a replica is meant for."""

    def __post_init__(self) -> None:
        Paced.__post_init__(self)
        if not 0 < self.max_outstanding < inf:
            raise ValueError(f"max_outstanding={self.max_outstanding}: must be a finite number > 0 requests")

    def target(self, pool: PoolView, now: float) -> int:
        """Replicas wanted; paced() keeps to the bounds."""
        return self.paced(ceil(pool.num_outstanding / self.max_outstanding), pool, now)
