"""Llumnix: requests move from the replicas with the least free memory per request to those with the most.

Sun et al., "Llumnix: Dynamic Scheduling for Large Language Model Serving", OSDI 2024. The load of a replica
is its freeness, in tokens per request: the number of iterations for which its memory lasts if every request
gets a token in each.

    freeness = (free KV memory - memory that the queue needs - headroom) / (running + 1 if a request waits)

    queue a waiting request counts as if it had its memory, so others make room for it (de-fragmentation), and
    a replica with a queue is a source
    headroom   a replica with urgent requests counts as so full that its load falls to priority_load_tokens:
               the other requests leave, and the urgent ones decode faster
    draining   a replica that is to be removed has a freeness of minus infinity

Sources are replicas below out_below_tokens and replicas with preempted requests; targets are replicas above
in_above_tokens without preempted requests. The least free source is paired with the freest target, the second
with the second, and so on; one request of each source moves.

Example: 800 tokens free, a prompt of 900 waits, 4 requests run: -100 / 5 = -20 tokens per request, a source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Annotated, Literal

from fieldlimits import Checked, Ge, NonNegative, Positive, PositiveInt, Unit, check
from policies.migration import MovableRequest, Move, ReplicaLoad


@dataclass(frozen=True, kw_only=True, slots=True)
class Llumnix(Checked):
    """Moves requests to balance freeness. Defaults come from the paper's artifact, in tokens."""

    interval_s: Annotated[Positive, Unit("s"), "or choose migration=none"] = 0.15
    """Seconds between two decisions."""
    out_below_tokens: Annotated[NonNegative, Unit("tokens")] = 48.0
    """Freeness in tokens per request below which a replica is a source."""
    in_above_tokens: Annotated[NonNegative, Unit("tokens")] = 48.0
    """Freeness above which a replica is a target."""
    queue: Literal["all", "first"] = "all"
    """Waiting requests whose memory counts: all (as in the artifact) or the first (as in the paper)."""
    moves_first: Literal["last", "shortest", "longest"] = "last"
    """Which request of a source moves: the last admitted one, or by its tokens with KV."""
    urgent_priority: int | None = None
    """Requests with this priority or a smaller one are urgent and do not move; null: no request is urgent."""
    priority_load_tokens: Annotated[PositiveInt, Unit("token")] = 1600
    """KV tokens above which a replica with urgent requests counts as full."""
    last_stage_tokens: Annotated[PositiveInt, Unit("token")] = 256
    """Tokens that may be copied while the request is stopped: 16 blocks of 16, as in Llumnix's code."""
    max_stages: Annotated[int, Ge(2), "as the first does not stop a request"] = 3
    """Maximum number of stages of a copy."""

    def __post_init__(self) -> None:
        check(self)
        if self.in_above_tokens < self.out_below_tokens:
            raise ValueError(
                f"in_above_tokens={self.in_above_tokens}: must be >= out_below_tokens="
                f"{self.out_below_tokens}, else a replica could be both source and target"
            )

    def freeness(self, replica: ReplicaLoad) -> float:
        """Computes the freeness of a replica in tokens per request; infinite without requests."""
        if replica.is_draining:
            return -inf
        num_requests = replica.num_running + (replica.num_waiting > 0)
        if not num_requests:
            return inf
        needed = replica.num_waiting_tokens if self.queue == "all" else replica.num_first_waiting_tokens
        free = replica.num_free_kv_tokens - needed
        if self.urgent_priority is not None:
            smallest = replica.smallest_priority
            if smallest is not None and smallest <= self.urgent_priority:
                free -= max(0, replica.num_kv_tokens - self.priority_load_tokens)
        return free / num_requests

    def moves(self, replicas: Sequence[ReplicaLoad], now: float) -> Sequence[Move]:
        """Pairs sources with targets within each pool; returns a move for each pair."""
        found: list[Move] = []
        for pool in sorted({replica.pool for replica in replicas}):
            found += self._moves_of_pool([r for r in replicas if r.pool == pool and not r.is_migrating])
        return found

    def _moves_of_pool(self, replicas: Sequence[ReplicaLoad]) -> list[Move]:
        ranked = sorted((self.freeness(replica), replica.index, replica) for replica in replicas)
        sources = [r for freeness, _, r in ranked if freeness < self.out_below_tokens or r.num_preempted]
        targets = [
            r
            for freeness, _, r in reversed(ranked)
            if freeness > self.in_above_tokens and not r.num_preempted
        ]
        moves = []
        for source, target in zip(sources, targets, strict=False):
            request = self._chosen(source)
            if request is not None and request.num_tokens < target.num_free_kv_tokens:
                moves.append(Move(request.request_id, source.index, target.index))
        return moves

    def _chosen(self, source: ReplicaLoad) -> MovableRequest | None:
        """Returns the request of a source that moves; None if no request may."""
        may_move = [
            request
            for request in source.movable
            if self.urgent_priority is None or request.priority > self.urgent_priority
        ]
        if not may_move:
            return None
        sign = -1 if self.moves_first == "shortest" else 1
        if self.moves_first == "last":
            return max(may_move, key=lambda request: request.admission)
        return max(may_move, key=lambda request: (sign * request.num_tokens, request.request_id))
