"""Autoscaling policies: they decide the number of replicas of a pool. One policy per file."""

from __future__ import annotations

from typing import Protocol


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
        """Number of replicas that drain: they finish their requests and get no new ones."""
        ...

    @property
    def cold_start_s(self) -> float:
        """Time in seconds from the request for a replica until it serves."""
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
        """Mean share of the time since the last call during which a replica ran an iteration."""
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
        """Number of ended requests that met the SLO; all of them if there is no SLO."""
        ...


class Scaling(Protocol):
    """Decides the number of replicas of a pool."""

    interval_s: float
    """Time in seconds between two calls; the first call is after one interval."""
    min_replicas: int
    max_replicas: int

    def target(self, pool: PoolView, now: float) -> int:
        """Returns the desired number of replicas, including starting ones and excluding draining ones.

        The number is from min_replicas to max_replicas. The pool starts missing replicas and drains
        superfluous ones; crashed replicas that will restart count as present.
        """
        ...
