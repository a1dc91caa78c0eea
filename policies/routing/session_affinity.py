"""Session affinity: consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, SODA 2018).

Replicas stand on a ring of hashes, at num_points places each. A session belongs to the first replica behind
its own hash, and passes on to the next while that replica has its share of all outstanding requests:

    bound = ceil(max_load * (all outstanding + 1) / replicas)

So a session finds its KV again, a popular session does not overload a replica, and adding or removing a
replica moves few sessions. HAProxy's hash-balance-factor does the same; 125 there is max_load=1.25 here. Each
request without a session counts as a session of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import ceil, inf, isinf

from policies.core.request import Request
from policies.routing import ReplicaView


@dataclass(kw_only=True, slots=True)
class SessionAffinity:
    """Consistent hashing of sessions. Reads outstanding requests of all replicas; none with max_load=inf."""

    max_load: float = 1.25
    """Maximum outstanding requests of a replica divided by the mean; inf: no bound."""
    num_points: int = 100
    """Number of places of each replica on the ring: more places make the shares more even."""
    _replicas: Sequence[ReplicaView] = field(init=False, default=(), repr=False, compare=False)
    _ring: list[tuple[int, int]] = field(init=False, default_factory=list, repr=False, compare=False)
    """Sorted hashes, each with the position of its replica."""

    def __post_init__(self) -> None:
        if not self.max_load > 1:
            raise ValueError(f"max_load={self.max_load}: must be > 1, the mean; inf for no bound")
        if self.num_points < 1:
            raise ValueError(f"num_points={self.num_points}: must be >= 1")

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """The session's replica, or the next on the ring that is not full."""
        num_replicas = len(replicas)
        if replicas is not self._replicas:
            self._ring = sorted(
                (_hash(f"replica/{replica.index}/{point}"), place)
                for place, replica in enumerate(replicas)
                for point in range(self.num_points)
            )
            self._replicas = replicas
        bound: float = inf
        if not isinf(self.max_load):
            total = sum([replica.num_outstanding for replica in replicas])
            bound = ceil(self.max_load * (total + 1) / num_replicas)
        place = bisect_right(self._ring, (_hash(_session(request)), num_replicas))
        for step in range(len(self._ring)):
            index = self._ring[(place + step) % len(self._ring)][1]
            if bound == inf or replicas[index].num_outstanding < bound:
                return index
        raise AssertionError("every replica is above the mean")


def _session(request: Request) -> str:
    if request.session_id is None:
        return f"request/{request.request_id}"
    return f"session/{request.tenant}/{request.session_id}"


def _hash(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
