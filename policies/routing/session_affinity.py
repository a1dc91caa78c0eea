"""Session affinity: consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, SODA 2018).

Each replica has num_points points on a ring of hashes. A request goes to the first replica after the hash of
its session, or to the next one on the ring if that replica's outstanding requests have reached the bound:

    bound = ceil(max_load * (all outstanding + 1) / replicas)

A session's requests therefore find their KV in the cache, a popular session does not overload a replica, and
adding or removing a replica moves few sessions. HAProxy's hash-balance-factor is the same; its 125 is
max_load=1.25 here. Each request without a session counts as a separate session.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import ceil, inf, isinf
from typing import Annotated, ClassVar

from fieldlimits import Checked, Gt, PositiveInt
from policies.core.request import Request
from policies.routing import ReplicaView


@dataclass(kw_only=True, slots=True)
class SessionAffinity(Checked):
    """Consistent hashing of sessions.

    Reads outstanding requests of all replicas, except with max_load=inf.
    """

    max_load: Annotated[float, Gt(1), "inf for no bound"] = 1.25
    """Maximum outstanding requests of a replica, divided by the mean of all; inf: no bound."""
    num_points: PositiveInt = 100
    """Number of points per replica on the ring; more points make the shares more even."""
    keeps_together: ClassVar[str] = "session"
    _replicas: Sequence[ReplicaView] = field(init=False, default=(), repr=False, compare=False)
    _ring: list[tuple[int, int]] = field(init=False, default_factory=list, repr=False, compare=False)
    """Sorted hashes, each with the position of its replica."""

    @property
    def reads_replicas(self) -> bool:
        """True if there is a bound on the load of replicas."""
        return not isinf(self.max_load)

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns the session's replica, or the next on the ring that is below the bound."""
        num_replicas = len(replicas)
        if replicas is not self._replicas:
            self._ring = sorted(
                (_hash(f"replica/{replica.index}/{point}"), position)
                for position, replica in enumerate(replicas)
                for point in range(self.num_points)
            )
            self._replicas = replicas
        bound: float = inf
        if not isinf(self.max_load):
            total = sum([replica.num_outstanding for replica in replicas])
            bound = ceil(self.max_load * (total + 1) / num_replicas)
        position = bisect_right(self._ring, (_hash(_session(request)), num_replicas))
        for step in range(len(self._ring)):
            index = self._ring[(position + step) % len(self._ring)][1]
            if bound == inf or replicas[index].num_outstanding < bound:
                return index
        raise AssertionError("every replica is above the mean")


def _session(request: Request) -> str:
    if request.session_id is None:
        return f"request/{request.request_id}"
    return f"session/{request.tenant}/{request.session_id}"


def _hash(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
