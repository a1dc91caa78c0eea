"""Whether a request is let in at all: asked before a replica is chosen. One policy a file."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple, Protocol

from policies.core.request import Request
from policies.routing import ReplicaView


class Refusal(NamedTuple):
    """Why a request is not let in, and when to ask again: HTTP's status 429 or 503 with Retry-After."""

    reason: str
    """The same words for the same cause, without numbers of the moment: reports count by it."""
    retry_after_s: float | None = None
    """None: nobody knows. inf: never, as with status 400: this request will not be let in at any time."""


class Admission(Protocol):
    """Lets requests in or refuses them.

    A request that is sent again is asked about again: with the same id and, as its client has waited since
    then, the same arrival_s. Two more methods are called if a policy has them, about requests that it has
    let in, once each at most:

        on_first_token(request, now)        it has produced its first token
        on_end(request, now)                it has ended, was given up, or was refused by its replica

    What a policy asks of the replicas beyond what the service counts itself, it declares as a router does:
    reads_signals, reads_caches (`policies.routing.ReplicaView`). A fleet may have hundreds of replicas: for
    sums over all of them a policy keeps counts of its own (`policies.admission.outstanding`).
    """

    def refusal(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> Refusal | None:
        """None: it is let in. `replicas` are those that take requests now, at least one."""
        ...


def check_retry_after(retry_after_s: float | None) -> None:
    """Raise ValueError for what no client could wait."""
    if retry_after_s is not None and not 0 <= retry_after_s < inf:
        raise ValueError(f"retry_after_s={retry_after_s}: must be finite and >= 0 s; null to tell nothing")


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raise ValueError for what is not among the allowed."""
    if value not in allowed:
        raise ValueError(f"{name}={value}: must be one of {', '.join(allowed)}")
