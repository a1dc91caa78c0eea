"""Saturation: sheddable requests are refused while the fleet is saturated.

As in the endpoint picker of the Gateway API Inference Extension and of llm-d without flow control
(llm-d-inference-scheduler v0.8.0, `saturationdetector/utilization` and `requestcontrol/admission.go`):

    saturation = mean over replicas of max(queue / max_queue, used share of KV memory / max_kv_share)

At 1 or more, requests with an importance below zero are refused. Here smaller priorities are served first, as
in vLLM, so requests with a priority above `max_kept_priority` are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from fieldlimits import Checked, Gt, Le, NonNegative, PositiveInt, Unit
from policies.admission import Refusal
from policies.core.request import Request
from policies.routing import ReplicaView


@dataclass(frozen=True, kw_only=True, slots=True)
class Saturation(Checked):
    """Refuses sheddable requests while the fleet is saturated. Reads signals of all replicas.

    Queue and memory are taken as reported by the engines, without a correction for requests sent since then.
    """

    max_queue: Annotated[PositiveInt, Unit("requests")] = 5
    """Number of waiting requests at which a replica is saturated."""
    max_kv_share: Annotated[float, Gt(0), Le(1)] = 0.8
    """Used share of KV memory at which a replica is saturated."""
    max_kept_priority: int | None = 0
    """Requests with a larger priority (served last) are refused; null: all requests are refused."""
    retry_after_s: Annotated[NonNegative | None, Unit("s"), "null for none"] = None
    """Retry-After in seconds sent to clients; null: none."""

    reads_signals: ClassVar[bool] = True

    def refusal(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> Refusal | None:
        """Refuses a sheddable request if the saturation is 1 or more."""
        is_kept = self.max_kept_priority is not None and request.priority <= self.max_kept_priority
        if is_kept or self.saturation(replicas) < 1:
            return None
        return Refusal("fleet saturated", self.retry_after_s)

    def saturation(self, replicas: Sequence[ReplicaView]) -> float:
        """Returns the saturation of the fleet; 1: saturated."""
        shares = (
            max(
                replica.num_waiting / self.max_queue,
                (1 - replica.num_free_kv_tokens / replica.num_kv_tokens) / self.max_kv_share,
            )
            for replica in replicas
        )
        return sum(shares) / len(replicas)
