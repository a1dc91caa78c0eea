"""Role policies: they decide which replicas prefill and which decode, if disaggregated. One per file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

ROLES = ("prefill", "decode")


class ReplicaLoad(NamedTuple):
    """Load of a replica: the service's own counts are current, the others as old as its signals."""

    name: int  # number of the replica
    role: str  # current role, or the new one while the replica drains: one of ROLES
    is_changing: bool  # whether the replica drains in order to change its role
    num_outstanding: int  # requests sent to the replica that have not left it
    num_queued_tokens: int  # prompt tokens of the outstanding requests without a first token
    kv_use_share: float  # share of the replica's KV memory in use


class Switch(NamedTuple):
    """A replica that changes its role, and the new role."""

    name: int
    role: str


class Roles(Protocol):
    """Decides every interval_s whether a replica changes its role."""

    @property
    def interval_s(self) -> float | None:
        """Seconds between two calls; None: never called."""
        ...

    def switch(self, loads: Sequence[ReplicaLoad], now: float) -> Switch | None:
        """Returns the replica to change now, or None. At least one replica of each role must remain."""
        ...
