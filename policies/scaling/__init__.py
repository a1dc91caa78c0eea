"""Autoscaling policies: how many replicas a pool has. One policy per file."""

from __future__ import annotations

from typing import Protocol


class PoolView(Protocol):
    """The current state of a pool of replicas that an autoscaler may read.

    Counts since the beginning of the run only grow: a policy that needs rates remembers their last values.
    """

    @property
    def num_replicas(self) -> int:
        """Number of replicas that serve."""
        ...

    @property
    def num_starting(self) -> int:
        """Number of replicas that start: being provisioned, loading, warming up."""
        ...

    @property
    def num_draining(self) -> int:
        """Number of replicas that drain: they finish their requests and get no more."""
        ...

    @property
    def cold_start_s(self) -> float:
        """Time in seconds from the order of a replica until it serves."""
        ...

    @property
    def max_concurrency(self) -> int | None:
        """Number of sequences that one replica runs at once; None if unknown."""
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
        """Mean share of the time since the last call in which a replica had an iteration running."""
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
        """Number of ended requests that met the SLO; all, if there is none."""
        ...


class Scaling(Protocol):
    """Decides how many replicas a pool should have."""

    interval_s: float
    """Time in seconds between two calls; the first call comes after one interval."""
    min_replicas: int
    max_replicas: int

    def target(self, pool: PoolView, now: float) -> int:
        """Number of replicas wanted, including starting ones and excluding draining ones.

        The number is from min_replicas to max_replicas. The pool starts missing replicas and drains
        superfluous ones; crashed replicas that will be back still count as wanted.
        """
        ...
