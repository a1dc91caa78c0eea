"""Scaling policy: decides the number of replicas of a pool. Describe it here; name the paper.

It sees: a PoolView at this instant: replicas running, starting and draining; requests running, waiting and
outstanding; KV usage and busy time as shares; and counts since the beginning of the run (arrivals, ends, SLOs
met), from which it can compute rates.
It never sees future requests or the start-up time of a replica.
It may: return the wanted number of replicas, and remember.
It must promise: a whole number from min_replicas to max_replicas, and equal states give equal decisions: no
clock other than `now`, no random numbers. A replica that has crashed and will return still counts.

Memory pressure: none. Horizon: it is asked every interval_s.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Annotated

from fieldlimits import Positive, Unit
from policies.scaling import PoolView
from policies.scaling.bounds import Paced


@dataclass(kw_only=True, slots=True)
class MyPolicy(Paced):
    """Keeps the outstanding requests per replica near a target; `Paced` limits how fast replicas change."""

    # Settings are the fields, with their defaults. State of the policy is a field, too:
    # field(init=False, default_factory=dict, repr=False, compare=False).
    stabilisation_s: float = 120.0
    max_outstanding: Annotated[Positive, Unit("requests")] = 32.0
    """Target number of outstanding requests per replica."""

    def target(self, pool: PoolView, now: float) -> int:
        """Returns the wanted number of replicas, within the bounds of paced()."""
        return self.paced(ceil(pool.num_outstanding / self.max_outstanding), pool, now)
