"""Which replicas of a disaggregated service compute prompts, and which decode. One policy a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

ROLES = ("prefill", "decode")


class ReplicaLoad(NamedTuple):
    """What is known of a replica, as fresh as a service's own counts and as old as its signals."""

    name: int  # of the replica
    role: str  # which it has, or will have once it is empty: one of ROLES
    is_changing: bool  # it is still being emptied
    num_outstanding: int  # requests sent there that have not left
    num_queued_tokens: int  # prompt tokens of those without a first token
    kv_use_share: float  # of its KV memory


class Switch(NamedTuple):
    """A replica that is to take the other role."""

    name: int
    role: str


class Roles(Protocol):
    """Looks at all replicas every interval_s."""

    @property
    def interval_s(self) -> float | None:
        """Seconds between two looks; None: never."""
        ...

    def switch(self, loads: Sequence[ReplicaLoad], now: float) -> Switch | None:
        """The replica to be turned now; None: all stay. One of each role has to be left."""
        ...
