"""Admission policies: whether a request is admitted, before a replica is chosen. One policy per file."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple, Protocol

from policies.core.request import Request
from policies.routing import ReplicaView


class Refusal(NamedTuple):
    """Why a request is refused, and when to ask again: HTTP status 429 or 503 with Retry-After."""

    reason: str
    """Equal text for equal causes, without momentary numbers: reports count refusals by it."""
    retry_after_s: float | None = None
    """Time in seconds. None: unknown. inf: never, as with status 400: the request will not be admitted."""


class Admission(Protocol):
    """Admits requests or refuses them.

    A request that is sent again is decided again: with the same id and, as its client has waited since then,
    the same arrival_s. Two more methods are called if a policy has them, about requests that it has admitted,
    once each at most:

        on_first_token(request, now)        it has produced its first token
        on_end(request, now)                it has ended, was given up, or was refused by its replica

    If a policy reads more of the replicas than what the service counts itself, it declares this as a router
    does: reads_signals, reads_caches (`policies.routing.ReplicaView`). A fleet may have hundreds of replicas:
    for sums over all of them a policy keeps counts of its own (`policies.admission.outstanding`).
    """

    def refusal(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> Refusal | None:
        """Returns None if the request is admitted. `replicas` take requests now; there is at least one."""
        ...


def check_retry_after(retry_after_s: float | None) -> None:
    """Raises ValueError unless retry_after_s is None or finite and >= 0."""
    if retry_after_s is not None and not 0 <= retry_after_s < inf:
        raise ValueError(f"retry_after_s={retry_after_s}: must be finite and >= 0 s; null: not sent")


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raises ValueError if a value is not among the allowed ones."""
    if value not in allowed:
        raise ValueError(f"{name}={value}: must be one of {', '.join(allowed)}")
