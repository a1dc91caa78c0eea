"""Admission policies: they admit or refuse a request before a replica is chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from policies.core.request import Request
from policies.routing import ReplicaView


class Refusal(NamedTuple):
    """The reason for a refusal, and the time of a retry: HTTP status 429 or 503 with Retry-After."""

    reason: str
    """Reason, a fixed text without current numbers, because reports count refusals by it."""
    retry_after_s: float | None = None
    """Retry-After in seconds; None: unknown; inf: a retry will never be admitted, as with HTTP status 400."""


class Admission(Protocol):
    """Admits requests or refuses them.

    A retry of a refused request is a new decision, with the same request id and the same arrival_s (its
    client has been waiting since then). Two optional methods are called for admitted requests, each at most
    once per request:

        on_first_token(request, now)        the request has produced its first token
        on_end(request, now)                the request has ended, was aborted, or was refused by its replica

    A policy that reads signals or caches of replicas declares this as a router does: reads_signals,
    reads_caches (`policies.routing.ReplicaView`). A fleet may have hundreds of replicas: for sums over all of
    them a policy keeps its own counts (`policies.admission.queue_bound.Outstanding`).
    """

    def refusal(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> Refusal | None:
        """Returns None if the request is admitted. `replicas` accept requests now; there is at least one."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionTraits:
    """Optional members of an admission policy next to `refusal`: see `Admission`."""

    reads_signals: bool = False
    reads_caches: bool = False
    on_first_token: Callable[[Request, float], None] | None = None
    on_end: Callable[[Request, float], None] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmitAll:
    """Admits every request; reads nothing."""

    def refusal(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> Refusal | None:
        """Returns None: every request is admitted."""
        return None
