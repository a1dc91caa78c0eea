"""Routing policies: which replica gets a request. One policy per file."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Protocol, TypeVar

from policies.core.request import Request


class ReplicaView(Protocol):
    """The state of a replica that a router may read.

    `index` identifies a replica for the whole run and is never used again: what a policy remembers of a
    replica is keyed by it. price_usd_per_hour is the price of the replica.

    A router counts by itself what it has sent and what came back, so these counts are current:

        num_outstanding, num_outstanding_tokens, num_queued_tokens

    A policy that looks at the first or the second of all replicas calls `policies.routing.loads.counts_of`,
    which need not ask hundreds of them one by one.

    The other values are reported by the engine once per iteration, and are as old as the service's signals
    (`signal_age_s`). Requests that were sent but are not included yet are known, too:

        num_running, num_waiting, num_free_kv_tokens;  num_unseen, num_unseen_tokens

    A policy that reads any of these declares reads_signals: ClassVar[bool] = True: they cost time to
    maintain.

    Engines report changes of their caches as these happen (KV events), so `num_cached` is as of the last
    iteration that has begun. A policy that reads it declares reads_caches: ClassVar[bool] = True.
    `has_adapter` is as recent, and costs nothing.
    """

    index: int
    price_usd_per_hour: float

    @property
    def num_outstanding(self) -> int:
        """Number of requests sent there that have not ended."""
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
        """Number of tokens for which KV memory is free; cached contents without a user count as free."""
        ...

    @property
    def num_kv_tokens(self) -> int:
        """Total number of tokens for which it has KV memory."""
        ...

    @property
    def num_unseen(self) -> int:
        """Number of requests sent there that the signals do not include yet."""
        ...

    @property
    def num_unseen_tokens(self) -> int:
        """Number of prompt tokens of the requests that the signals do not include yet."""
        ...

    def has_adapter(self, name: str) -> bool:
        """Whether a LoRA adapter is on its GPU, or being loaded there."""
        ...

    def num_cached(self, request: Request) -> int:
        """Number of prompt tokens whose KV it holds: the prefix hit if the request were admitted now."""
        ...


class Routing(Protocol):
    """Chooses a replica for each request as it arrives.

    Replicas come and go. The policy gets the replicas that take requests now, by rising index, in the same
    list object until one comes or goes. With prefill/decode disaggregation, one router chooses the replica
    for the prompt, another the one that continues with the decode. Optional methods, called if a policy has
    them:

        check(num_replicas)                 before the run: ValueError for settings that do not fit the fleet
        on_predicted(request, num_tokens)   the predicted length of its answer; before `choose`, for a
                                            policy with needs_predictor: ClassVar[bool] = True
        on_first_token(request, now)        a request sent has produced its first token
        on_end(request, now)                it has ended, was given up, was refused by its replica, or left it
    """

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns the position in `replicas` of the replica that gets the request."""
        ...


Member = TypeVar("Member", bound=ReplicaView)


class UnknownReplicaError(ValueError):
    """A routing policy has chosen a replica that does not exist."""


def chosen(routing: Routing, place: int, replicas: Sequence[Member], key: str = "routing") -> Member:
    """Returns the replica at the position that a policy has chosen. key: name of the policy, for messages.

    Raises UnknownReplicaError for a position outside `replicas`.
    """
    if not 0 <= place < len(replicas):
        raise UnknownReplicaError(
            f"{key}={type(routing).__name__}: choose returned {place}; must be a place in `replicas`, 0 to "
            f"{len(replicas) - 1} (not `index`, of which replicas that are gone have some)"
        )
    return replicas[place]


COUNTS = {"requests": "num_outstanding", "tokens": "num_outstanding_tokens"}
"""Values of `count` for policies that compare loads, and the attribute of `ReplicaView` that each reads."""


def check_count(count: str) -> None:
    """Raises ValueError unless count is a key of COUNTS."""
    if count not in COUNTS:
        raise ValueError(f"count={count}: must be one of {', '.join(COUNTS)}")


def check_by_replica(name: str, values: Sequence[float], num_replicas: int) -> None:
    """Raises ValueError unless there is one value per replica, or none at all."""
    if values and len(values) != num_replicas:
        raise ValueError(
            f"{name}={list(values)}: must be one for each of the {num_replicas} replicas, "
            f"found {len(values)}; [] makes all alike"
        )


def check_positive(name: str, values: Sequence[float]) -> None:
    """Raises ValueError unless all values are finite and > 0."""
    for index, value in enumerate(values):
        if not 0 < value < inf:
            raise ValueError(f"{name}[{index}]={value}: must be a finite number > 0")
