"""Routing policies: they choose the replica for each request. One idea per file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from policies.core.request import Request
from policies.user_code import WrongDecisionError, is_whole, returned, traits_of


class ReplicaView(Protocol):
    """The state of a replica that a router may read.

    `index` identifies a replica for the whole run and is never reused, so policies store data about replicas
    by it. price_usd_per_hour is the price of the replica.

    The router itself counts the requests that it has sent and the requests that ended, so these counts are
    current:

        num_outstanding, num_outstanding_tokens, num_queued_tokens

    A policy that compares the first or second count of all replicas calls
    `policies.routing.load_balancing.counts_of`, which reads hundreds of replicas at once.

    The other values are reported by the engine once per iteration and are as old as the service's signals
    (`signal_age_s`). The router also counts the sent requests that these values do not include yet:

        num_running, num_waiting, num_free_kv_tokens;  num_unseen, num_unseen_tokens

    A policy that reads any of these declares reads_signals: ClassVar[bool] = True, because they cost time to
    maintain.

    Engines report changes of their caches as they happen (KV events), so `num_cached` includes everything up
    to the start of the latest iteration. A policy that reads it declares reads_caches: ClassVar[bool] = True.
    `has_adapter` is equally recent, and needs no declaration.

    A policy that reads no replica, except `index` and the number of replicas, declares
    reads_replicas: ClassVar[bool] = False. Such a run can be divided into shards that are simulated
    separately.

    A policy that sends requests with the same prefix, session or adapter to the same replicas declares
    keeps_together: ClassVar[str] = "prefix", "session" or "adapter", for partial simulation of fleets
    (`sim.setup.thinning`).
    """

    index: int
    price_usd_per_hour: float

    @property
    def num_outstanding(self) -> int:
        """Number of requests sent to the replica that have not ended."""
        ...

    @property
    def num_outstanding_tokens(self) -> int:
        """Number of prompt tokens of the outstanding requests."""
        ...

    @property
    def num_queued_tokens(self) -> int:
        """Number of prompt tokens of the outstanding requests that have produced no output token yet."""
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
    def num_free_kv_tokens(self) -> int:
        """Free KV memory in tokens; cached blocks that no request uses count as free."""
        ...

    @property
    def num_kv_tokens(self) -> int:
        """Capacity of the replica's KV memory in tokens."""
        ...

    @property
    def num_unseen(self) -> int:
        """Number of requests sent to the replica that its signals do not include yet."""
        ...

    @property
    def num_unseen_tokens(self) -> int:
        """Number of prompt tokens of the requests that its signals do not include yet."""
        ...

    def has_adapter(self, name: str) -> bool:
        """Returns whether a LoRA adapter is on the replica's GPU, or being loaded to it."""
        ...

    def num_cached(self, request: Request) -> int:
        """Returns the number of prompt tokens that would be a prefix-cache hit if admitted there now."""
        ...


class Routing(Protocol):
    """Chooses a replica for each request as it arrives.

    Replicas are added and removed during a run. The policy gets the replicas that accept requests now, in
    order of their index; the list object stays the same until a replica is added or removed. With
    prefill/decode disaggregation, one router chooses the prefill replica and another the decode replica.
    Optional methods, called if a policy has them:

        check(num_replicas)                 before the run: ValueError for settings that do not fit the fleet
        on_predicted(request, num_tokens)   the predicted output length; called before `choose`, for a
                                            policy with needs_predictor: ClassVar[bool] = True
        on_first_token(request, now)        a request has produced its first token
        on_end(request, now)                a request has ended, was aborted, was refused by its replica, or
                                            has moved to another replica
    """

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns the position in `replicas` of the replica that gets the request."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingTraits:
    """Optional members of a router next to `choose`: see `ReplicaView` and `Routing`."""

    reads_replicas: bool = True
    reads_signals: bool = False
    reads_caches: bool = False
    keeps_together: str | None = None
    needs_predictor: bool = False
    check: Callable[[int], None] | None = None
    on_predicted: Callable[[Request, int], None] | None = None
    on_first_token: Callable[[Request, float], None] | None = None
    on_end: Callable[[Request, float], None] | None = None


Member = TypeVar("Member", bound=ReplicaView)


def chosen(routing: Routing, position: int, replicas: Sequence[Member]) -> Member:
    """Returns the replica at the position that a policy has chosen.

    Raises WrongDecisionError for a position outside `replicas`.
    """
    if not ((type(position) is int or is_whole(position)) and 0 <= position < len(replicas)):
        rule = (
            f"must return a position in `replicas`, 0 to {len(replicas) - 1} (not a replica's `index`, "
            "which also counts removed replicas)"
        )
        raise returned(routing, "choose", position, rule)
    return replicas[position]


COUNTS = {"requests": "num_outstanding", "tokens": "num_outstanding_tokens"}
"""Allowed values of `count` in policies that compare loads, each with its attribute of `ReplicaView`."""


def check_by_replica(name: str, values: Sequence[float], num_replicas: int) -> None:
    """Raises ValueError unless there is one value per replica, or none at all."""
    if values and len(values) != num_replicas:
        raise ValueError(
            f"{name}={list(values)}: must have {num_replicas} values, one per replica, found {len(values)}; "
            "[] gives all replicas equal values"
        )


STATE = frozenset(n for n in (*ReplicaView.__annotations__, *vars(ReplicaView)) if n[0] != "_") - {"index"}
"""The part of a replica that a router without a declaration may read."""


def reads_replicas(routing: object) -> bool:
    """Returns whether a policy may read the state of replicas (True without a declaration)."""
    return bool(traits_of(routing, RoutingTraits).reads_replicas)


@runtime_checkable
class ChoosesMany(Protocol):
    """A static policy that also reads no request, so it can choose for many requests at once."""

    def choose_many(self, count: int, replicas: Sequence[ReplicaView]) -> NDArray[np.int64]:
        """Returns the results of the next `count` calls of `choose`, [count]."""
        ...


class IndexOnly:
    """A view of a replica with only its index; reading anything else raises WrongDecisionError."""

    __slots__ = ("_routing", "index")

    def __init__(self, index: int, routing: object) -> None:
        self.index = index
        self._routing = routing

    def __getattr__(self, name: str) -> Any:
        if name not in STATE:
            raise AttributeError(name)
        raise WrongDecisionError(
            self._routing,
            "choose",
            f"has read {name} of a replica, although reads_replicas is false",
            "it may read only index; leave out the declaration, or do not read it",
        )


def index_views(indices: Iterable[int], routing: Routing) -> list[ReplicaView]:
    """Returns a view for each index, for a policy that reads no replica."""
    return [cast(ReplicaView, IndexOnly(index, routing)) for index in indices]
