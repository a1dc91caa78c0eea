"""Migration policies: they decide which running requests move to another replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Protocol

from policies.user_code import WrongDecisionError, returned, shown


class MovableRequest(NamedTuple):
    """A decoding request that may continue on another replica."""

    request_id: int
    priority: int  # as in `Request`: smaller is more urgent
    num_tokens: int  # tokens with KV
    admission: int  # number of its admission; the last admitted request has the largest


class ReplicaLoad(Protocol):
    """The state of a replica that a migration policy may read, as of the running iteration.

    `index` identifies a replica for the whole run. Requests can only move between replicas of the same
    `pool`.
    """

    index: int
    pool: int
    is_draining: bool
    """Whether the replica gets no new requests and is removed after its last request."""
    is_migrating: bool
    """Whether a request is moving to or from the replica; only one can move at a time."""

    @property
    def num_kv_tokens(self) -> int:
        """Capacity of the replica's KV memory in tokens."""
        ...

    @property
    def num_free_kv_tokens(self) -> int:
        """Free KV memory in tokens; cached blocks that no request uses count as free."""
        ...

    @property
    def num_running(self) -> int:
        """Number of sequences with a slot."""
        ...

    @property
    def num_waiting(self) -> int:
        """Number of sequences in the engine's queue."""
        ...

    @property
    def num_preempted(self) -> int:
        """Number of sequences in the queue that were preempted."""
        ...

    @property
    def num_waiting_tokens(self) -> int:
        """KV memory needed by the queued sequences, in tokens of whole blocks."""
        ...

    @property
    def num_first_waiting_tokens(self) -> int:
        """KV memory needed by the first queued sequence, in tokens; 0: none waits."""
        ...

    @property
    def smallest_priority(self) -> int | None:
        """Smallest (most urgent) priority of its running and waiting requests; None: it has no requests."""
        ...

    @property
    def movable(self) -> Sequence[MovableRequest]:
        """The requests that may move: decoding requests, in the order of admission."""
        ...


class Move(NamedTuple):
    """A request, and the indices of its source and target replicas."""

    request_id: int
    source: int
    target: int


class Migration(Protocol):
    """Decides every `interval_s` which running requests move.

    The KV of a request is copied in stages while it decodes: first all full blocks, then the blocks written
    meanwhile, and so on. When at most last_stage_tokens are left, the request stops, the rest is copied, and
    the request continues on the other replica. A move is cancelled if the request ends or is preempted, if
    the other replica has no room, or if the move needs more than max_stages stages.
    """

    @property
    def interval_s(self) -> float | None:
        """Seconds between two calls; None: never called."""
        ...

    @property
    def last_stage_tokens(self) -> int:
        """Maximum number of tokens copied while the request is stopped."""
        ...

    @property
    def max_stages(self) -> int:
        """Maximum number of stages."""
        ...

    def moves(self, replicas: Sequence[ReplicaLoad], now: float) -> Sequence[Move]:
        """Returns the moves that begin now; replicas: serving and draining replicas, in order of their index.

        A replica can be part of one move at a time: see `ReplicaLoad.is_migrating`.
        """
        ...


def checked_interval_s(policy: Migration) -> float | None:
    """Returns the time between two calls of a policy. Raises WrongDecisionError unless it is > 0."""
    interval_s: object = policy.interval_s
    if interval_s is None:
        return None
    if not isinstance(interval_s, int | float) or not 0 < interval_s < inf:
        did = f"is called every {shown(interval_s)} s"
        raise WrongDecisionError(policy, "moves", did, "interval_s must be a finite number > 0 s, or None")
    return interval_s


def checked_moves(
    policy: Migration, moves: Sequence[Move], replicas: Sequence[ReplicaLoad]
) -> Sequence[Move]:
    """Returns the moves of a policy. Raises WrongDecisionError if one of them is impossible."""
    by_index = {replica.index: replica for replica in replicas}
    taken = {replica.index for replica in replicas if replica.is_migrating}
    for move in moves:
        if not isinstance(move, Move):
            raise returned(policy, "moves", move, "must return a sequence of `policies.migration.Move`")
        source, target = by_index.get(move.source), by_index.get(move.target)
        if source is None or target is None or source is target or source.pool != target.pool:
            rule = "must name two replicas of the same pool by their `index`"
            raise returned(policy, "moves", move, rule)
        if target.is_draining:
            raise returned(policy, "moves", move, "must not move a request to a replica that drains")
        if source.index in taken or target.index in taken:
            raise returned(policy, "moves", move, "must use a replica in one move at a time")
        if all(request.request_id != move.request_id for request in source.movable):
            raise returned(policy, "moves", move, "must name one of the `movable` requests of its source")
        taken |= {source.index, target.index}
    return moves


@dataclass(frozen=True, kw_only=True, slots=True)
class Stay:
    """Never moves a request: it stays on its replica until it ends."""

    @property
    def interval_s(self) -> float | None:
        """Seconds between two calls; None, because `moves` is never called."""
        return None

    @property
    def last_stage_tokens(self) -> int:
        """Maximum number of tokens of the last stage; unused."""
        return 0

    @property
    def max_stages(self) -> int:
        """Maximum number of stages; unused."""
        return 0

    def moves(self, replicas: Sequence[ReplicaLoad], now: float) -> Sequence[Move]:
        """Returns an empty sequence: running requests stay where they are."""
        return ()
