"""The load of a replica, as seen by routers: counts that the replica keeps, and signals of its engine.

Signals and cache view are placeholders if no policy declares that it reads them.
"""

from __future__ import annotations

from typing import NoReturn, Protocol, cast

from policies.core.request import Request
from policies.core.sequence import Sequence


class LoadCounts:
    """The counts of `policies.routing.ReplicaView`: some are current, the others come from load signals."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self.signals: LoadSignals = NO_SIGNALS
        """Load signals of the engine, attached if a policy reads them."""
        self.cache_view: CacheReader = NO_CACHE_VIEW
        """The content of its prefix cache, attached if a policy reads it."""
        self.num_outstanding = 0
        self.num_outstanding_tokens = 0
        self.num_queued_tokens = 0
        self.num_kv_tokens = num_blocks * block_size
        self._block_size = block_size
        self._queued: dict[int, int] = {}  # prompt tokens by request id, until the first token here

    @property
    def num_running(self) -> int:
        """Running sequences, according to the signals."""
        return self.signals.num_running

    @property
    def num_waiting(self) -> int:
        """Waiting sequences, according to the signals."""
        return self.signals.num_waiting

    @property
    def num_free_kv_tokens(self) -> int:
        """Free KV memory in tokens, according to the signals."""
        return self.num_kv_tokens - self.signals.num_blocks_used * self._block_size

    @property
    def num_unseen(self) -> int:
        """Number of requests sent to this replica that the signals do not count yet."""
        return self.signals.num_unseen

    @property
    def num_unseen_tokens(self) -> int:
        """Prompt tokens of the requests that the signals do not count yet."""
        return self.signals.num_unseen_tokens

    def num_cached(self, request: Request) -> int:
        """Returns the number of cached tokens of a prompt at the start of the latest iteration.

        Raises RuntimeError unless the run's policies declare that they read caches.
        """
        return self.cache_view.num_cached(request)

    def count_queued(self, request_id: int, num_tokens: int) -> None:
        """Counts a request that was sent here and has no output token yet."""
        self._queued[request_id] = num_tokens
        self.num_queued_tokens += num_tokens

    def _uncount(self, seq: Sequence) -> None:
        """Removes a request from the counts of outstanding and queued requests."""
        self.num_outstanding -= 1
        self.num_outstanding_tokens -= seq.request.prompt.num_tokens
        if self._queued:
            self.num_queued_tokens -= self._queued.pop(seq.request_id, 0)

    def _uncount_all(self) -> None:
        self._queued.clear()
        self.num_outstanding = self.num_outstanding_tokens = self.num_queued_tokens = 0


class LoadSignals(Protocol):
    """The counts that an engine reports."""

    @property
    def num_running(self) -> int:
        """Counts the sequences that hold a slot."""
        ...

    @property
    def num_waiting(self) -> int:
        """Counts the sequences that wait to be scheduled."""
        ...

    @property
    def num_blocks_used(self) -> int:
        """KV blocks that sequences own."""
        ...

    @property
    def num_unseen(self) -> int:
        """Number of requests sent to the replica that these counts do not include yet."""
        ...

    @property
    def num_unseen_tokens(self) -> int:
        """Prompt tokens of the requests that these counts do not include yet."""
        ...


class CacheReader(Protocol):
    """The prefix cache of a replica."""

    def num_cached(self, request: Request) -> int:
        """Returns the number of cached tokens of a prompt at the start of the latest iteration."""
        ...


class NoSignals:
    """Load signals that no policy has declared to read: reading one raises RuntimeError."""

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError("signals: the routing policy must declare reads_signals: ClassVar[bool] = True")


class NoCacheView:
    """A cache that no policy has declared to read: reading it raises RuntimeError."""

    def num_cached(self, request: Request) -> int:
        """Raises RuntimeError."""
        raise RuntimeError("num_cached: the routing policy must declare reads_caches: ClassVar[bool] = True")


NO_SIGNALS = cast(LoadSignals, NoSignals())
NO_CACHE_VIEW: CacheReader = NoCacheView()
