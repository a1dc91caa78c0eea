"""The prefix cache of a replica, as routing policies see it."""

from __future__ import annotations

from bisect import bisect_left

from policies.core.request import Request
from sim.engine.attachment import Attachment
from sim.engine.clock import Clock
from sim.engine.replica import Replica


class CacheView(Attachment):
    """A `CacheReader`: the cache as of the last iteration that has begun, also in the middle of a leap."""

    def __init__(self, replica: Replica, clock: Clock) -> None:
        self._replica = replica
        self._clock = clock

    def num_cached(self, request: Request) -> int:
        """Returns the number of tokens of a prompt that are cached."""
        self.before_external_event()
        core = self._replica.core
        return core.block_pool.peek(request) if core.ranks is None else core.ranks.peek(request)

    def before_external_event(self) -> None:
        """Cuts a leap after the iterations that have ended, if they have changed the content of the cache.

        The cut must precede the external event, as the plan that is made at the cut must not depend on it.
        """
        replica = self._replica
        step, core = replica.step, replica.core
        if step is None or step.num_iterations == 1:
            return
        num_ended = min(bisect_left(step.ends_s, self._clock.now), step.num_iterations - 1)
        if not num_ended:
            return
        if (
            not step.plan.chunks
            and core.blocks_of_repeats(step.plan, num_ended) <= core.block_pool.num_free_without_content
        ):
            return  # nothing was evicted
        replica.commit_and_replan(num_ended)
