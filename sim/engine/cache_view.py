"""What a routing policy sees of a replica's cache."""

from __future__ import annotations

from bisect import bisect_left

from policies.core.request import Request
from sim.engine.attachment import Attachment
from sim.engine.clock import Clock
from sim.engine.readings import NoCacheView
from sim.engine.replica import Replica


class CacheView(Attachment, NoCacheView):
    """Shows a cache as of the last iteration that has begun, in the middle of a leap, too."""

    def __init__(self, replica: Replica, clock: Clock) -> None:
        self._replica = replica
        self._clock = clock

    def num_cached(self, request: Request) -> int:
        """Tokens of a prompt that the cache has."""
        self.intervening()
        return self._replica.core.block_pool.peek(request)

    def intervening(self) -> None:
        """Cut a leap behind the iterations that have ended, if they have changed what the cache holds.

        The cut must come before anything else comes from outside: the plan made there must not know of it.
        """
        replica = self._replica
        step, core = replica.step, replica.core
        if step is None or step.num_iterations == 1:
            return
        num_ended = min(bisect_left(step.ends_s, self._clock.now), step.num_iterations - 1)
        if not num_ended:
            return
        if not step.plan.chunks and core.blocks_of_repeats(step.plan, num_ended) <= core.block_pool.num_blank:
            return  # nothing was evicted
        replica.split(num_ended)
