"""Autoscaling policies: they decide the number of replicas of a pool. One idea per file."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Generic, NamedTuple, Protocol, TypeVar

from policies.user_code import WrongDecisionError, is_whole, returned, shown


class PoolView(Protocol):
    """The current state of a pool of replicas that an autoscaler may read.

    Counts are totals since the beginning of the run: a policy that needs rates stores their last values.
    """

    @property
    def num_replicas(self) -> int:
        """Number of replicas that serve."""
        ...

    @property
    def num_starting(self) -> int:
        """Number of replicas that are being provisioned, loading or warming up."""
        ...

    @property
    def num_draining(self) -> int:
        """Number of draining replicas: they finish their requests and get no new ones."""
        ...

    @property
    def cold_start_s(self) -> float:
        """Time in seconds from requesting a replica until it serves."""
        ...

    @property
    def max_concurrency(self) -> int | None:
        """Maximum number of running sequences of one replica; None if unknown."""
        ...

    @property
    def num_outstanding(self) -> int:
        """Number of requests sent to the pool that have not ended."""
        ...

    @property
    def num_outstanding_tokens(self) -> int:
        """Number of prompt tokens of the outstanding requests."""
        ...

    @property
    def num_running(self) -> int:
        """Number of sequences with a slot, over all replicas."""
        ...

    @property
    def num_waiting(self) -> int:
        """Number of sequences in the engines' queues, over all replicas."""
        ...

    @property
    def kv_usage(self) -> float:
        """Share of the KV memory of serving replicas that is in use."""
        ...

    @property
    def busy_share(self) -> float:
        """Mean share of the time since the last call in which a replica ran an iteration."""
        ...

    @property
    def num_arrivals(self) -> int:
        """Number of requests sent to the pool since the run began."""
        ...

    @property
    def num_arrived_tokens(self) -> int:
        """Number of prompt tokens sent to the pool since the run began."""
        ...

    @property
    def num_ended(self) -> int:
        """Number of requests that have ended since the run began."""
        ...

    @property
    def num_met(self) -> int:
        """Number of ended requests that met the SLO; all of them if there is no SLO.

        With prefill and decode in different pools, only TTFT (prefill) or TPOT (decode) counts. A missed E2E
        counts in the pool that took longer.
        """
        ...


class Scaling(Protocol):
    """Decides the number of replicas of a pool."""

    interval_s: float
    """Time in seconds between two calls; the first call comes after one interval."""
    min_replicas: int
    max_replicas: int

    def target(self, pool: PoolView, now: float) -> int:
        """Returns the desired number of replicas, including starting ones and excluding draining ones.

        The number must be between min_replicas and max_replicas. The pool starts missing replicas and drains
        surplus ones; crashed replicas that will restart count as present.
        """
        ...


def checked_target(policy: Scaling, target: int) -> int:
    """Returns a policy's desired number of replicas. Raises WrongDecisionError if it is not allowed."""
    least, most = policy.min_replicas, policy.max_replicas
    if not is_whole(target) or not least <= target <= most:
        rule = f"must return a whole number from min_replicas={least} to max_replicas={most}"
        raise returned(policy, "target", target, rule)
    return target


def checked_interval_s(policy: Scaling) -> float:
    """Returns the time between two calls of a policy. Raises WrongDecisionError unless it is > 0."""
    interval_s: object = policy.interval_s
    if not isinstance(interval_s, int | float) or not 0 < interval_s < inf:
        did = f"is called every {shown(interval_s)} s"
        raise WrongDecisionError(policy, "target", did, "interval_s must be a finite number > 0 s")
    return interval_s


M = TypeVar("M")


class Present(NamedTuple, Generic[M]):
    """A replica that counts towards a scaling policy's target: it serves, starts, or is temporarily down."""

    member: M
    is_serving: bool
    num_outstanding: int
    number: int


class Change(NamedTuple, Generic[M]):
    """The number of replicas to start, and the replicas to drain, in this order."""

    num_starts: int
    drained: list[M]


def change_to(target: int, present: Sequence[Present[M]]) -> Change[M]:
    """Returns the changes that lead to `target` replicas.

    Replicas that do not serve are drained first, then those with the fewest outstanding requests, then the
    newest.
    """
    ranked = sorted(
        present,
        key=lambda each: (not each.is_serving, -each.num_outstanding, each.number),
        reverse=True,
    )
    num_drained = max(0, len(present) - target)
    return Change(max(0, target - len(present)), [each.member for each in ranked[:num_drained]])
