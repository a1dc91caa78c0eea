"""Role policies: which replicas prefill and which decode, if disaggregated. One policy per file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

ROLES = ("prefill", "decode")


class ReplicaLoad(NamedTuple):
    """Load of a replica: the service's own counts are current, the others as old as its signals."""

    name: int  # number of the replica
    role: str  # current role, or the next one while it drains: one of ROLES
    is_changing: bool  # whether it still drains
    num_outstanding: int  # requests sent there that have not left
    num_queued_tokens: int  # prompt tokens of those without a first token
    kv_use_share: float  # share of its KV memory in use


class Switch(NamedTuple):
    """A replica that changes its role, and the new role."""

    name: int
    role: str


class Roles(Protocol):
    """Decides on role changes every interval_s."""

    @property
    def interval_s(self) -> float | None:
        """Seconds between two calls; None: never called."""
        ...

    def switch(self, loads: Sequence[ReplicaLoad], now: float) -> Switch | None:
        """The replica to change now; None: none. At least one replica of each role has to be left."""
        ...
