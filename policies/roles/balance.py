"""Replicas change from the pool with little load to the pool with much.

After Arrow (2025) and DOPD (2025), which watch what limits each phase: the queue of prompts, which TTFT waits
for, and the KV memory of decodes, which admission waits for. Prefill is behind when a prefill replica has
more than max_backlog_tokens in its queue on average; decode is behind when decode replicas use more than
max_kv_share of their memory. A pool that is behind gets a replica of the other, if that is not behind itself
and would not be with one fewer. The replica with the fewest outstanding requests changes. Then nothing
changes for rest_s, so that the change can take effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from policies.roles import ReplicaLoad, Switch


@dataclass(kw_only=True, slots=True)
class Balance:
    """Balances the two pools. Ties go to the smallest name."""

    interval_s: float = 1.0
    """Seconds between two decisions."""
    max_backlog_tokens: int = 16_384
    """Prompt tokens in the queue of a prefill replica, on average, above which prefill is behind."""
    max_kv_share: float = 0.8
    """KV use of the decode replicas, on average, above which decode is behind."""
    rest_s: float = 10.0
    """Seconds after a change in which there is no other."""
    _rests_until_s: float = field(init=False, default=-inf, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 < self.interval_s < inf:
            raise ValueError(f"interval_s={self.interval_s}: must be a finite number > 0 s")
        if self.max_backlog_tokens < 1:
            raise ValueError(f"max_backlog_tokens={self.max_backlog_tokens}: must be >= 1 token")
        if not 0 < self.max_kv_share <= 1:
            raise ValueError(f"max_kv_share={self.max_kv_share}: must be > 0 and <= 1")
        if not 0 <= self.rest_s < inf:
            raise ValueError(f"rest_s={self.rest_s}: must be a finite number >= 0 s")

    def switch(self, loads: Sequence[ReplicaLoad], now: float) -> Switch | None:
        """The replica that changes to the pool that is behind."""
        if now < self._rests_until_s or any(load.is_changing for load in loads):
            return None
        prefill = [load for load in loads if load.role == "prefill"]
        decode = [load for load in loads if load.role == "decode"]
        backlog = sum(load.num_queued_tokens for load in prefill)
        kv_use = sum(load.kv_use_share for load in decode)
        is_prefill_behind = backlog > self.max_backlog_tokens * len(prefill)
        is_decode_behind = kv_use > self.max_kv_share * len(decode)
        if is_prefill_behind and kv_use <= self.max_kv_share * (len(decode) - 1):
            givers, role = decode, "prefill"
        elif is_decode_behind and backlog <= self.max_backlog_tokens * (len(prefill) - 1):
            givers, role = prefill, "decode"
        else:
            return None
        if len(givers) < 2:
            return None
        self._rests_until_s = now + self.rest_s
        return Switch(min(givers, key=lambda load: (load.num_outstanding, load.name)).name, role)
