"""Load balancing: round robin, random, by weight, or by the load of the replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from math import inf
from operator import attrgetter
from typing import Annotated, ClassVar, Literal, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from fieldlimits import Checked, OneOf, Positive, PositiveInt, Unit
from policies.core.request import Request
from policies.prediction import uniform
from policies.routing import COUNTS, ReplicaView, check_by_replica


@dataclass(kw_only=True, slots=True)
class RoundRobin:
    """Round robin; stores only the last chosen replica."""

    _turn: int = field(default=-1, init=False)

    reads_replicas: ClassVar[bool] = False

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns the replica after the last one chosen."""
        self._turn = (self._turn + 1) % len(replicas)
        return self._turn

    def choose_many(self, count: int, replicas: Sequence[ReplicaView]) -> NDArray[np.int64]:
        """Returns the next `count` replicas in turn."""
        turns = (self._turn + 1 + np.arange(count)) % len(replicas)
        if count:
            self._turn = int(turns[-1])
        return turns


@dataclass(frozen=True, kw_only=True, slots=True)
class Random:
    """Uniform random choice. Reads no replica."""

    seed: int = 0
    """Seed of the draws."""

    reads_replicas: ClassVar[bool] = False

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns a random replica."""
        return int(uniform(self.seed, "routing.random", request.request_id) * len(replicas))


@dataclass(kw_only=True, slots=True)
class Weighted(Checked):
    """Fixed shares by weight. Reads no replica; a choice takes time logarithmic in their number.

    It works like an earliest-deadline-first queue (Envoy's weighted round robin): a replica of weight w is
    due every 1/w units of virtual time, and the replica that is due first gets the request. The weights 2 and
    1 give the order 0, 0, 1, 0, 0, 1 ...
    """

    weights: tuple[Positive, ...] = ()
    """Weight of each replica, by index; empty: all equal. Replicas added later have weight 1."""
    _replicas: Sequence[ReplicaView] = field(init=False, default=(), repr=False, compare=False)
    _due: list[tuple[float, int]] = field(init=False, default_factory=list, repr=False, compare=False)
    """Heap of (virtual time at which a replica is due, its position)."""

    reads_replicas: ClassVar[bool] = False

    def check(self, num_replicas: int) -> None:
        """Raises ValueError unless there is one weight per replica, or none at all."""
        check_by_replica("weights", self.weights, num_replicas)

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns the replica that is due first; ties go to the smallest index."""
        if replicas is not self._replicas:
            self._rebuild(replicas)
        due, position = self._due[0]
        heapreplace(self._due, (due + 1 / self._weight(replicas[position]), position))
        return position

    def choose_many(self, count: int, replicas: Sequence[ReplicaView]) -> NDArray[np.int64]:
        """Returns the replicas that are due next, one after the other."""
        if replicas is not self._replicas:
            self._rebuild(replicas)
        gaps = [1 / self._weight(replica) for replica in replicas]
        queue = self._due
        positions = np.empty(count, np.int64)
        for i in range(count):
            due, position = queue[0]
            heapreplace(queue, (due + gaps[position], position))
            positions[i] = position
        return positions

    def _rebuild(self, replicas: Sequence[ReplicaView]) -> None:
        """Rebuilds the heap; known replicas keep their turns, new ones count as just served."""
        known = {self._replicas[position].index: due for due, position in self._due}
        served = self._due[0][0] if self._due else 0.0
        self._due = [
            (known.get(replica.index, served + 1 / self._weight(replica)), position)
            for position, replica in enumerate(replicas)
        ]
        heapify(self._due)
        self._replicas = replicas

    def _weight(self, replica: ReplicaView) -> float:
        return self.weights[replica.index] if replica.index < len(self.weights) else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LeastOutstanding(Checked):
    """Fewest outstanding requests or tokens. Ties go to the smallest index. Reads all replicas.

    NGINX's least_conn counts requests. Tokens distinguish a long prompt from a short one. A request counts
    from the time it is sent until it ends, in the router's own count, which has no delay. Routers that
    compare hundreds of replicas read these counts as an array.
    """

    count: Annotated[str, OneOf(COUNTS)] = "requests"
    """The compared load: requests, or tokens (of their prompts)."""

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns the replica with the fewest outstanding requests or tokens."""
        return int(counts_of(replicas, COUNTS[self.count]).argmin())


class Counted(Protocol):
    """A sequence of replicas that keeps their counts in arrays."""

    def counts(self, name: str) -> NDArray[np.int64]:
        """Returns the result of `counts_of`: a read-only array, valid until a count changes."""
        ...


def counts_of(replicas: Sequence[ReplicaView], name: str) -> NDArray[np.int64]:
    """Returns num_outstanding or num_outstanding_tokens, by `name`, of all replicas [num_replicas].

    The array is read-only and valid until a count changes. Raises ValueError for another name.
    """
    if name not in COUNTS.values():
        raise ValueError(f"counts_of: name={name}: must be one of {', '.join(COUNTS.values())}")
    if hasattr(replicas, "counts"):
        return cast(Counted, replicas).counts(name)
    counts = np.fromiter(map(attrgetter(name), replicas), np.int64, len(replicas))
    counts.flags.writeable = False
    return counts


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerOfTwo(Checked):
    """Least loaded of num_choices random replicas. Ties go to the replica drawn first.

    Reads only these replicas.

    Mitzenmacher (IEEE TPDS 2001), Vvedenskaya et al. (1996): two choices shorten the longest queue
    exponentially compared with one; more choices add little. Envoy's least request and SGLang's router offer
    it.
    """

    num_choices: Annotated[PositiveInt, Unit("replica")] = 2
    """Number of distinct replicas to compare; if fewer accept requests, all are compared."""
    count: Annotated[str, OneOf(COUNTS)] = "requests"
    """The compared load: outstanding requests, or tokens (of their prompts)."""
    seed: int = 0
    """Seed of the draws."""

    def check(self, num_replicas: int) -> None:
        """Raises ValueError if there are fewer replicas than choices."""
        if self.num_choices > num_replicas:
            raise ValueError(
                f"num_choices={self.num_choices}: must be <= {num_replicas}, the number of replicas"
            )

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns the least loaded of the drawn replicas."""
        name = COUNTS[self.count]
        return min(self._drawn(request, len(replicas)), key=lambda index: getattr(replicas[index], name))

    def _drawn(self, request: Request, num_replicas: int) -> list[int]:
        """Draws num_choices distinct replicas; every set is equally likely (Floyd's algorithm)."""
        drawn: list[int] = []
        for last in range(max(0, num_replicas - self.num_choices), num_replicas):
            stream = f"routing.power_of_two.{last - num_replicas}"
            index = int(uniform(self.seed, stream, request.request_id) * (last + 1))
            drawn.append(last if index in drawn else index)
        return drawn


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinShortestKv:
    """Most free KV memory. Reads all replicas.

    Memory, not the number of requests, limits the batch of a replica. The free memory that an engine reports
    is as old as the service's signals; prompts sent since then are subtracted as if none of their KV were
    cached.
    """

    ties: Literal["outstanding", "index"] = "outstanding"
    """Tie-break between replicas with equal free memory: the fewest outstanding requests, then the smallest
    index; or only the smallest index, which reads nothing but signals.
    """

    reads_signals: ClassVar[bool] = True

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns the replica with the most free KV memory."""
        if self.ties == "index":
            used = [replica.num_unseen_tokens - replica.num_free_kv_tokens for replica in replicas]
            return used.index(min(used))
        keys = [
            (replica.num_unseen_tokens - replica.num_free_kv_tokens, replica.num_outstanding)
            for replica in replicas
        ]
        return keys.index(min(keys))


@dataclass(frozen=True, kw_only=True, slots=True)
class Freest:
    """Most free KV memory per request; an empty replica is the freest. Ties go to the smallest index.

    This is the dispatch of Llumnix (OSDI 2024), which the paper also uses as the baseline INFaaS++. Prompts
    without a first token count as additional memory in use, so a replica with a queue is less free. With a
    chunked prefill, the part of a prompt that is computed counts twice until its first token.
    """

    reads_signals: ClassVar[bool] = True

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns the freest replica."""
        loads = [
            (replica.num_queued_tokens - replica.num_free_kv_tokens) / replica.num_outstanding
            if replica.num_outstanding
            else -inf
            for replica in replicas
        ]
        return loads.index(min(loads))
