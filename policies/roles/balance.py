"""Balancing of prefill and decode pools: a replica changes its role when one of the pools is overloaded.

As in Arrow (2025) and DOPD (2025), the signals are the limits of each phase: the queued prompt tokens, which
determine TTFT, and the KV memory of the decode replicas, which limits admission. The prefill pool is
overloaded when its replicas have more than max_backlog_tokens in their queues on average; the decode pool
when its replicas use more than max_kv_share of their KV memory. An overloaded pool gets a replica of the
other pool if that pool would not be overloaded with one replica fewer. The replica with the fewest
outstanding requests changes. After that, no other replica changes for rest_s, so that the change can take
effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Annotated

from fieldlimits import Checked, NonNegative, Positive, PositiveInt, PositiveShare, Unit
from policies.roles import ReplicaLoad, Switch


@dataclass(kw_only=True, slots=True)
class Balance(Checked):
    """Balances the two pools. Ties go to the replica with the smallest number."""

    interval_s: Annotated[Positive, Unit("s")] = 1.0
    """Seconds between two decisions."""
    max_backlog_tokens: Annotated[PositiveInt, Unit("token")] = 16_384
    """Average number of queued prompt tokens per prefill replica above which the prefill pool is overloaded.
    """
    max_kv_share: PositiveShare = 0.8
    """Average share of KV memory in use above which the decode pool is overloaded."""
    rest_s: Annotated[NonNegative, Unit("s")] = 10.0
    """Seconds after a change during which no other change is made."""
    _rests_until_s: float = field(init=False, default=-inf, repr=False, compare=False)

    def switch(self, loads: Sequence[ReplicaLoad], now: float) -> Switch | None:
        """Returns the replica that changes to the overloaded pool, or None."""
        if now < self._rests_until_s or any(load.is_changing for load in loads):
            return None
        prefill = [load for load in loads if load.role == "prefill"]
        decode = [load for load in loads if load.role == "decode"]
        backlog = sum(load.num_queued_tokens for load in prefill)
        kv_use = sum(load.kv_use_share for load in decode)
        is_prefill_overloaded = backlog > self.max_backlog_tokens * len(prefill)
        is_decode_overloaded = kv_use > self.max_kv_share * len(decode)
        if is_prefill_overloaded and kv_use <= self.max_kv_share * (len(decode) - 1):
            candidates, role = decode, "prefill"
        elif is_decode_overloaded and backlog <= self.max_backlog_tokens * (len(prefill) - 1):
            candidates, role = prefill, "decode"
        else:
            return None
        if len(candidates) < 2:
            return None
        self._rests_until_s = now + self.rest_s
        return Switch(min(candidates, key=lambda load: (load.num_outstanding, load.name)).name, role)
