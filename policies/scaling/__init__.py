"""How many replicas a pool has: autoscaling. One policy a file."""

from __future__ import annotations

from typing import Protocol


class PoolView(Protocol):
    """What an autoscaler may know of a pool of replicas, all of this very instant.

    Counts from the run's beginning only grow: whoever wants rates remembers what they were when last asked.
    """

    @property
    def num_replicas(self) -> int:
        """Replicas that serve."""
        ...

    @property
    def num_starting(self) -> int:
        """Replicas on their way: being provisioned, loading, warming up."""
        ...

    @property
    def num_draining(self) -> int:
        """Replicas that finish what they have and get nothing more."""
        ...

    @property
    def cold_start_s(self) -> float:
        """From the order of a replica until it serves."""
        ...

    @property
    def max_concurrency(self) -> int | None:
        """Sequences that one replica runs at once; None if nobody knows."""
        ...

    @property
    def num_outstanding(self) -> int:
        """Requests sent to the pool that have not ended."""
        ...

    @property
    def num_outstanding_tokens(self) -> int:
        """Prompt tokens of those."""
        ...

    @property
    def num_running(self) -> int:
        """Sequences with a slot, over all replicas."""
        ...

    @property
    def num_waiting(self) -> int:
        """Sequences in the engines' queues, over all replicas."""
        ...

    @property
    def kv_usage(self) -> float:
        """Share of the KV memory of the replicas that serve which is in use."""
        ...

    @property
    def busy_share(self) -> float:
        """Share of the time since the last asking in which replicas had an iteration running, their mean."""
        ...

    @property
    def num_arrivals(self) -> int:
        """Requests sent to the pool since the run began."""
        ...

    @property
    def num_arrived_tokens(self) -> int:
        """Prompt tokens of those."""
        ...

    @property
    def num_ended(self) -> int:
        """Requests that have ended since the run began."""
        ...

    @property
    def num_met(self) -> int:
        """Those of them that met the SLO; all, if there is none."""
        ...


class Scaling(Protocol):
    """Says how many replicas a pool should have."""

    interval_s: float
    """How often it is asked, for the first time after one interval."""
    min_replicas: int
    max_replicas: int

    def target(self, pool: PoolView, now: float) -> int:
        """Replicas wanted, those that start included and those that drain left out.

        From min_replicas to max_replicas. The pool starts those that it lacks, and has those drain that it
        does not need; replicas that have crashed and will be back are wanted still.
        """
        ...
