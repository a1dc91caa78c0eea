"""What a router reads of a replica: the counts that it keeps itself, and what the engine says."""

from __future__ import annotations

from policies.core.request import Request
from policies.core.sequence import Sequence
from sim.engine.readings import NO_CACHE_VIEW, NO_SIGNALS, NoCacheView, Readings


class LoadCounts:
    """The counts of `policies.routing.ReplicaView`: those of this instant, and those that signals tell."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self.signals: Readings = NO_SIGNALS
        """What the engine says of itself; attached where a policy reads it."""
        self.cache_view: NoCacheView = NO_CACHE_VIEW
        """The same of its cache."""
        self.num_outstanding = 0
        self.num_outstanding_tokens = 0
        self.num_queued_tokens = 0
        self.num_kv_tokens = num_blocks * block_size
        self._block_size = block_size
        self._queued: dict[int, int] = {}  # by request id: prompt tokens of those without a token from here

    @property
    def num_running(self) -> int:
        """Sequences with a slot, as far as the signals tell."""
        return self.signals.num_running

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue, as far as the signals tell."""
        return self.signals.num_waiting

    @property
    def num_free_kv_tokens(self) -> int:
        """Tokens for which KV memory is free, as far as the signals tell."""
        return self.num_kv_tokens - self.signals.num_blocks_used * self._block_size

    @property
    def num_unseen(self) -> int:
        """Requests sent here that the signals do not count yet."""
        return self.signals.num_unseen

    @property
    def num_unseen_tokens(self) -> int:
        """Prompt tokens of those."""
        return self.signals.num_unseen_tokens

    def num_cached(self, request: Request) -> int:
        """Tokens of a prompt that the cache has, as of the last iteration that has begun.

        Raises RuntimeError unless the run's policies declare that they read caches.
        """
        return self.cache_view.num_cached(request)

    def count_queued(self, request_id: int, num_tokens: int) -> None:
        """A request was sent here that has no token of its answer yet."""
        self._queued[request_id] = num_tokens
        self.num_queued_tokens += num_tokens

    def _uncount(self, seq: Sequence) -> None:
        """A request is outstanding no more."""
        self.num_outstanding -= 1
        self.num_outstanding_tokens -= seq.request.prompt.num_tokens
        if self._queued:
            self.num_queued_tokens -= self._queued.pop(seq.request_id, 0)

    def _uncount_all(self) -> None:
        self._queued.clear()
        self.num_outstanding = self.num_outstanding_tokens = self.num_queued_tokens = 0
