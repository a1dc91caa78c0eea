"""Which replica gets a request. One policy a file."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Protocol, TypeVar

from policies.core.request import Request


class ReplicaView(Protocol):
    """What a router may know of a replica.

    `index` is its own for the whole run and never used again: what a policy remembers of a replica belongs to
    it. price_usd_per_hour is what it costs.

    A router counts by itself what it has sent and what came back, so those counts are of this very instant:

        num_outstanding, num_outstanding_tokens, num_queued_tokens

    A policy that looks at the first or the second of all replicas asks `policies.routing.loads.counts_of`,
    which need not ask hundreds of them one by one.

    The rest is what the engine says of itself, once an iteration, and as old as the service's signals are
    (`signal_age_s`). Requests that were sent and are not in it yet are known, too:

        num_running, num_waiting, num_free_kv_tokens;  num_unseen, num_unseen_tokens

    A policy that asks for any of these declares reads_signals: ClassVar[bool] = True: they cost time to keep.

    Engines report changes of their caches as these happen (KV events), so `num_cached` is as of the last
    iteration that has begun. A policy that asks for it declares reads_caches: ClassVar[bool] = True. The same
    holds for `has_adapter`, which costs nothing.
    """

    index: int
    price_usd_per_hour: float

    @property
    def num_outstanding(self) -> int:
        """Requests sent there that have not ended."""
        ...

    @property
    def num_outstanding_tokens(self) -> int:
        """Prompt tokens of those."""
        ...

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of those that have no token of their answer yet."""
        ...

    @property
    def num_running(self) -> int:
        """Sequences with a slot."""
        ...

    @property
    def num_waiting(self) -> int:
        """Sequences in the engine's queue."""
        ...

    @property
    def num_free_kv_tokens(self) -> int:
        """Tokens for which KV memory is free; contents that nobody uses any more are free memory."""
        ...

    @property
    def num_kv_tokens(self) -> int:
        """Tokens for which it has KV memory at all."""
        ...

    @property
    def num_unseen(self) -> int:
        """Requests sent there that the signals do not count yet."""
        ...

    @property
    def num_unseen_tokens(self) -> int:
        """Prompt tokens of those."""
        ...

    def has_adapter(self, name: str) -> bool:
        """Whether a LoRA adapter is on its GPU, or on its way there."""
        ...

    def num_cached(self, request: Request) -> int:
        """Tokens of a prompt whose KV it holds: what the request would find if it were admitted now."""
        ...


class Routing(Protocol):
    """Chooses a replica for each request as it arrives.

    Replicas come and go. It is given those that take requests now, by rising index, in the same list object
    until one comes or goes. Where prefill and decode are apart, one router chooses the replica for the
    prompt, another the one that goes on with it. More methods are called if a policy has them:

        check(num_replicas)                 before the run: ValueError for settings that do not fit the fleet
        on_predicted(request, num_tokens)   how long its answer is expected to be; before `choose`, for a
                                            policy with needs_predictor: ClassVar[bool] = True
        on_first_token(request, now)        a request sent has produced its first token
        on_end(request, now)                it has ended, was given up, was refused by its replica, or left it
    """

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """The place in `replicas` of the one that gets the request."""
        ...


Member = TypeVar("Member", bound=ReplicaView)


class UnknownReplicaError(ValueError):
    """A routing policy has chosen a replica that there is not."""


def chosen(routing: Routing, place: int, replicas: Sequence[Member], key: str = "routing") -> Member:
    """The replica at the place that a policy has chosen; key: of the policy, for messages.

    Raises UnknownReplicaError for a place that there is not.
    """
    if not 0 <= place < len(replicas):
        raise UnknownReplicaError(
            f"{key}={type(routing).__name__}: choose returned {place}; must be a place in `replicas`, 0 to "
            f"{len(replicas) - 1} (not `index`, of which replicas that are gone have some)"
        )
    return replicas[place]


COUNTS = {"requests": "num_outstanding", "tokens": "num_outstanding_tokens"}
"""What a policy that compares loads may compare: the attribute of `ReplicaView`."""


def check_count(count: str) -> None:
    """Raise ValueError for what is no key of COUNTS."""
    if count not in COUNTS:
        raise ValueError(f"count={count}: must be one of {', '.join(COUNTS)}")


def check_by_replica(name: str, values: Sequence[float], num_replicas: int) -> None:
    """Raise ValueError unless there is one value a replica, or none at all."""
    if values and len(values) != num_replicas:
        raise ValueError(
            f"{name}={list(values)}: must be one for each of the {num_replicas} replicas, "
            f"found {len(values)}; [] makes all alike"
        )


def check_positive(name: str, values: Sequence[float]) -> None:
    """Raise ValueError unless all are finite and > 0."""
    for index, value in enumerate(values):
        if not 0 < value < inf:
            raise ValueError(f"{name}[{index}]={value}: must be a finite number > 0")
