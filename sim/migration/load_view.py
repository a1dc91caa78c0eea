"""The state of a replica for migration policies, as of the running iteration."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property

from policies.core.sequence import DECODING
from policies.migration import MovableRequest
from sim.engine.replica import Replica


class LoadView:
    """The `ReplicaLoad` of a replica at time now, before any event of that time.

    During a leap the values are those of the current iteration, equal to single steps. Values that a policy
    does not read are not computed.
    """

    def __init__(
        self, replica: Replica, pool: int, now: float, *, is_draining: bool, is_migrating: bool
    ) -> None:
        self.index = replica.index
        self.pool = pool
        self.is_draining = is_draining
        self.is_migrating = is_migrating
        self.num_kv_tokens = replica.num_kv_tokens
        self._core = replica.core
        self._step = step = replica.step
        self._num_ended = 0 if step is None else bisect_left(step.ends_s, now, hi=step.num_iterations - 1)

    @cached_property
    def num_free_kv_tokens(self) -> int:
        """Free KV memory in tokens."""
        pool, num_grown = self._core.block_pool, 0
        if self._num_ended:
            assert self._step is not None
            num_grown = self._core.blocks_of_repeats(self._step.plan, self._num_ended)
        return (pool.num_free - num_grown) * pool.block_size

    @property
    def num_running(self) -> int:
        """Number of sequences with a slot."""
        return len(self._core.running)

    @property
    def num_waiting(self) -> int:
        """Number of sequences in the queue."""
        return self._core.num_waiting

    @cached_property
    def num_preempted(self) -> int:
        """Number of sequences in the queue that were preempted."""
        if not self._core.num_preemptions:
            return 0
        return sum(seq.num_preemptions > 0 for seq in self._core.waiting)

    @cached_property
    def num_waiting_tokens(self) -> int:
        """KV memory needed by the queued sequences, in tokens."""
        pool = self._core.block_pool
        return sum(pool.blocks_for(seq.num_known) for seq in self._core.waiting) * pool.block_size

    @property
    def num_first_waiting_tokens(self) -> int:
        """KV memory needed by the first queued sequence, in tokens."""
        pool = self._core.block_pool
        first = next(iter(self._core.waiting), None)
        return 0 if first is None else pool.blocks_for(first.num_known) * pool.block_size

    @property
    def smallest_priority(self) -> int | None:
        """Smallest priority of its requests; None: it has no requests."""
        priorities = (seq.request.priority for seq in self._core.unfinished)
        return min(priorities, default=None)

    @cached_property
    def movable(self) -> Sequence[MovableRequest]:
        """The decoding requests, in the order of admission."""
        step = self._step
        num_more = self._num_ended if step is not None and step.plan.num_decodes else 0
        return [
            MovableRequest(seq.request_id, seq.request.priority, seq.num_computed + num_more, seq.admission)
            for seq in self._core.running.values()
            if seq.state is DECODING and seq.finish_reason is None and seq.request.branching is None
        ]
