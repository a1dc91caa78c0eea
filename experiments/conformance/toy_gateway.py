"""A gateway with a toy fleet that plays a world's requests, to test admission policies.

Each replica serves one request after the other. The prompt is computed at 4 tokens per tick, then comes the
first token, and the request ends after one tick per output token. A replica refuses requests that exceed its
context length, and clients give up as in the world. Policies thus see requests that end with and without a
first token, several at one time, and in any order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field, fields, is_dataclass
from heapq import heappop, heappush
from math import inf
from typing import Any, NamedTuple

from experiments.conformance.worlds import Traffic, World
from policies.admission import Refusal
from policies.core.request import Request

TOKENS_PER_TICK = 4
SIGNALS = ("num_running", "num_waiting", "num_free_kv_tokens", "num_unseen", "num_unseen_tokens")
DECLARED = dict.fromkeys(SIGNALS, "reads_signals") | {"num_cached": "reads_caches"}
"""Signal of a replica that a policy must declare before it reads it -> the declaration."""


@dataclass
class ToyReplica:
    """`ReplicaView` of an engine that serves one request after the other, without a prefix cache."""

    index: int
    policy: Any
    num_outstanding: int = 0
    num_outstanding_tokens: int = 0
    num_queued_tokens: int = 0
    num_kv_tokens: int = 1 << 20
    free_s: float = 0.0
    """Time at which it has served all its requests, in seconds."""

    def __getattr__(self, name: str) -> Any:
        if name not in DECLARED:
            raise AttributeError(name)
        flag = DECLARED[name]
        assert getattr(self.policy, flag, False), (
            f"reading {name} of a replica must be declared by {flag}: ClassVar[bool] = True"
        )
        if name == "num_cached":
            return lambda request: 0
        return self.num_kv_tokens if name == "num_free_kv_tokens" else 0


class Asked(NamedTuple):
    """Request that arrived at the gateway, and the decision of the admission policy."""

    request: Request
    now: float
    refusal: Refusal | None


@dataclass
class ToyGateway:
    """Admission policy with the requests that it has admitted; times given to it must not decrease."""

    world: World
    policy: Any
    asked: list[Asked] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.replicas = [ToyReplica(i, self.policy) for i in range(self.world.num_replicas)]
        self._events: list[tuple[float, int, str, Request, ToyReplica]] = []
        self._num_events = 0
        self._open: dict[int, tuple[Request, ToyReplica]] = {}  # admitted requests that have not ended, by id
        self._answered: set[int] = set()  # ids of those that have a first token

    def ask(self, request: Request, num_output_tokens: int, now: float) -> Refusal | None:
        """Advances to the time `now`, asks the policy about a request, and serves it if it is admitted."""
        self.until(now)
        refusal: Refusal | None = self.policy.refusal(request, self.replicas, now)
        self.asked.append(Asked(request, now, refusal))
        if refusal is None:
            self._serve(request, num_output_tokens, now)
        return refusal

    def until(self, now: float) -> None:
        """Reports all first tokens and ends up to a time to the policy."""
        while self._events and self._events[0][0] <= now:
            time_s, _, kind, request, replica = heappop(self._events)
            if request.request_id in self._open:
                (self._first_token if kind == "first_token" else self._end)(request, replica, time_s)

    def end_all(self, now: float) -> None:
        """Ends all admitted requests, as if their clients gave up."""
        for request, replica in list(self._open.values()):
            self._end(request, replica, now)

    def _serve(self, request: Request, num_output_tokens: int, now: float) -> None:
        tick_s, num_tokens = self.world.model.tick_s, request.prompt.num_tokens
        replica = min(self.replicas, key=lambda replica: (replica.num_outstanding, replica.index))
        replica.num_outstanding += 1
        replica.num_outstanding_tokens += num_tokens
        replica.num_queued_tokens += num_tokens
        self._open[request.request_id] = request, replica
        if num_tokens >= self.world.max_model_len:
            self._end(request, replica, now)
            return
        first_s = max(now, replica.free_s) + num_tokens / TOKENS_PER_TICK * tick_s
        replica.free_s = first_s + num_output_tokens * tick_s
        self._expect(first_s, "first_token", request, replica)
        self._expect(replica.free_s, "end", request, replica)
        if self.world.patience_s is not None:
            self._expect(now + self.world.patience_s, "end", request, replica)

    def _expect(self, time_s: float, kind: str, request: Request, replica: ToyReplica) -> None:
        self._num_events += 1
        heappush(self._events, (time_s, self._num_events, kind, request, replica))

    def _first_token(self, request: Request, replica: ToyReplica, now: float) -> None:
        self._answered.add(request.request_id)
        replica.num_queued_tokens -= request.prompt.num_tokens
        if hasattr(self.policy, "on_first_token"):
            self.policy.on_first_token(request, now)

    def _end(self, request: Request, replica: ToyReplica, now: float) -> None:
        replica.num_outstanding -= 1
        replica.num_outstanding_tokens -= request.prompt.num_tokens
        del self._open[request.request_id]
        if request.request_id in self._answered:
            self._answered.remove(request.request_id)
        else:
            replica.num_queued_tokens -= request.prompt.num_tokens
        if hasattr(self.policy, "on_end"):
            self.policy.on_end(request, now)


def play(world: World) -> ToyGateway:
    """Plays all requests of a world in order of arrival, until the last one has ended."""
    gateway = ToyGateway(world, deepcopy(world.admission))
    for arrival in Traffic(world.asks).arrivals():
        gateway.ask(arrival.request, arrival.num_output_tokens, arrival.at_s)
    gateway.until(inf)
    return gateway


def num_remembered(thing: Any) -> int:
    """Counts the objects that an object holds in containers and fields, recursively.

    A deque with a maxlen counts as one, because its size is bounded.
    """
    if isinstance(thing, str | bytes | int | float | None):
        return 1
    if isinstance(thing, deque) and thing.maxlen is not None:
        return 1
    if isinstance(thing, dict):
        return num_remembered(thing.keys()) + num_remembered(thing.values())
    if isinstance(thing, Iterable):
        return 1 + sum(map(num_remembered, thing))
    names = [f.name for f in fields(thing)] if is_dataclass(thing) else list(getattr(thing, "__dict__", ()))
    return 1 + sum(num_remembered(getattr(thing, name)) for name in names)
