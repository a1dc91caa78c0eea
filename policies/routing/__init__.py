"""Which replica gets a request. One policy a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from policies.request import Request


class ReplicaView(Protocol):
    """What a router may know of a replica."""

    @property
    def num_outstanding(self) -> int:
        """Requests sent there that have not ended."""
        ...


class Routing(Protocol):
    """Chooses a replica for each request as it arrives."""

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Index of the replica that gets the request."""
        ...
