"""Utilisation: keeps the utilisation at a target, by the formula of Kubernetes' HorizontalPodAutoscaler.

    wanted = ceil(replicas * utilisation / target),  unless the ratio is within the tolerance of 1

4 replicas at 90 % with a target of 60 % become 6. Defaults are those of Kubernetes: a call every 15 s, a
tolerance of 0.1, a window of 300 s before replicas are removed. As in Kubernetes, starting replicas count as
idle while the others are overloaded, so that a rise of the load does not add replicas twice.

The signal `busy` is what nvidia-smi calls utilisation. It is a poor signal for LLMs, because one sequence
keeps a replica as busy as a hundred. `kv` and `running` rise with the load until requests have to wait. If
replicas have no known maximum of running sequences, `running` falls back to `kv`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Annotated

from fieldlimits import NonNegative, OneOf, PositiveShare
from policies.scaling import PoolView
from policies.scaling.bounds import Paced

SIGNALS = ("busy", "kv", "running")


@dataclass(kw_only=True, slots=True)
class Utilisation(Paced):
    """Scales by the mean utilisation of the serving replicas."""

    signal: Annotated[str, OneOf(SIGNALS)] = "running"
    """busy: share of time with an iteration running; kv: share of KV memory; running: share of slots."""
    target_share: PositiveShare = 0.6
    tolerance: NonNegative = 0.1
    """Maximum deviation of utilisation / target from 1 without a change."""
    stabilisation_s: float = 300.0

    def target(self, pool: PoolView, now: float) -> int:
        """Returns the number of replicas that brings the utilisation to its target."""
        asked = self.asked(pool)
        num_up = max(pool.num_replicas, 1)
        ratio = self._utilisation(pool) / self.target_share
        wanted = asked
        if abs(ratio - 1) > self.tolerance:
            for_target = ceil(num_up * ratio - 1e-9)
            wanted = max(asked, for_target) if ratio > 1 else min(asked, for_target)
        return self.paced(wanted, pool, now)

    def _utilisation(self, pool: PoolView) -> float:
        if self.signal == "busy":
            return pool.busy_share
        if self.signal == "running" and pool.max_concurrency:
            return pool.num_running / (max(pool.num_replicas, 1) * pool.max_concurrency)
        return pool.kv_usage
