"""The load of a replica, as routers read it: counts that the replica keeps, and signals of its engine.

Signals and cache view have stand-ins if no policy is declared to read them.
"""

from __future__ import annotations

from math import inf, nextafter
from typing import NamedTuple, NoReturn, Protocol, cast

from policies.core.request import Request
from policies.core.sequence import Sequence
from policies.gateway.gateway import Now


class LoadCounts:
    """The counts of `policies.routing.ReplicaView`: some are current, the others come from load signals."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self.signals: LoadSignals = NO_SIGNALS
        """Load signals of the engine; attached if a policy reads them."""
        self.cache_view: CacheReader = NO_CACHE_VIEW
        """The content of its prefix cache; attached if a policy reads it."""
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
        """Requests sent to this replica that the signals do not count yet."""
        return self.signals.num_unseen

    @property
    def num_unseen_tokens(self) -> int:
        """Prompt tokens of the requests that the signals do not count yet."""
        return self.signals.num_unseen_tokens

    def num_cached(self, request: Request) -> int:
        """Returns the number of cached tokens of a prompt, as of the last iteration that has begun.

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
        """Requests sent to the replica that these counts do not include yet."""
        ...

    @property
    def num_unseen_tokens(self) -> int:
        """Prompt tokens of the requests that these counts do not include yet."""
        ...


class CacheReader(Protocol):
    """The prefix cache of a replica."""

    def num_cached(self, request: Request) -> int:
        """Returns the number of cached tokens of a prompt, as of the last iteration that has begun."""
        ...


class NoSignals:
    """Load signals of a replica that no policy has declared to read: reading one raises RuntimeError."""

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError("signals: the routing policy must declare reads_signals: ClassVar[bool] = True")


class NoCacheView:
    """The cache of a replica that no policy has declared to read: reading it raises RuntimeError."""

    def num_cached(self, request: Request) -> int:
        """Raises RuntimeError."""
        raise RuntimeError("num_cached: the routing policy must declare reads_caches: ClassVar[bool] = True")


NO_SIGNALS = cast(LoadSignals, NoSignals())
NO_CACHE_VIEW: CacheReader = NoCacheView()


MIN_AGE_S = 1e-6


class Counts(NamedTuple):
    """Counts when one iteration was planned; num_blocks_used includes the blocks that it takes."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks_used: int = 0
    num_entered: int = 0  # requests that had reached the engine
    num_entered_tokens: int = 0  # prompt tokens of these requests


def check_age(age_s: float) -> None:
    """Raises ValueError unless age_s is 0 or a finite number of at least MIN_AGE_S seconds."""
    if age_s and not MIN_AGE_S <= age_s < inf:
        raise ValueError(f"signal_age_s={age_s}: must be 0 or a finite number >= {MIN_AGE_S:g} s")


def refresh_times_s(now: float, age_s: float) -> tuple[float, float]:
    """Returns the time of the last refresh up to now, and of the next one, in seconds. age_s must be > 0."""
    period = now // age_s
    if period * age_s > now:  # the quotient was rounded
        period -= 1
    elif (period + 1) * age_s <= now:
        period += 1
    return period * age_s, (period + 1) * age_s


class AgedSignals:
    """A `LoadSignals` of counts that an engine publishes. The times of reads must not decrease.

    clock: of the router. age_s: maximum age of the counts, s.
    """

    def __init__(self, clock: Now, age_s: float) -> None:
        check_age(age_s)
        self._clock = clock
        self._age_s = age_s
        self.reset()

    def reset(self) -> None:
        """Begins anew, for an engine without requests."""
        self._num_sent = self._num_sent_tokens = 0  # requests sent since the engine started
        self._counts = Counts()  # as of the latest plan
        self._seen = self._counts
        self._next_s = -inf  # time of the next refresh

    @property
    def num_running(self) -> int:
        return self._read().num_running

    @property
    def num_waiting(self) -> int:
        return self._read().num_waiting

    @property
    def num_blocks_used(self) -> int:
        return self._read().num_blocks_used

    @property
    def num_unseen(self) -> int:
        return self._num_sent - self._read().num_entered

    @property
    def num_unseen_tokens(self) -> int:
        return self._num_sent_tokens - self._read().num_entered_tokens

    def sent(self, request: Request) -> None:
        """Counts a request that the router sends to the engine."""
        self._num_sent += 1
        self._num_sent_tokens += request.prompt.num_tokens

    def publish(self, counts: Counts, now: float) -> None:
        """Handles the counts of an iteration that begins now."""
        self.refresh(now)
        self._counts = counts

    def _read(self) -> Counts:
        """Returns the counts that a router sees now."""
        now = self._clock.now
        if now >= self._next_s:
            self.refresh(now)
        return self._seen

    def refresh(self, now: float) -> None:
        """Computes the counts of the latest refresh, unless they are known."""
        if now < self._next_s:
            return
        refreshed_s = now
        if self._age_s:
            refreshed_s, self._next_s = refresh_times_s(now, self._age_s)
        else:
            self._next_s = nextafter(now, inf)
        self._seen = self._as_of(refreshed_s)

    def _as_of(self, time_s: float) -> Counts:
        """Returns the counts of the last iteration that began before time_s > time of the latest plan."""
        return self._counts


# DOC of policies.gateway.load: The load signals of one engine as a router sees them: as old as the service's signals.
#
# An engine publishes its counts once per iteration, and the router fetches them at multiples of an age:
#
#     fetched              |<------- age ------->|                       a read in this period gives the counts
#     iterations    | 1 |  2  | 3 | 4  |   5  | 6 |   7  |               of iteration 2: the last that began
#                          ^ refreshed            ^ read                 before the refresh
#
# All replicas are refreshed at the same times. No event happens at these times: the counts that a refresh would
# have fetched are computed at the first read, or before the first change after it, whichever comes first. So
# the cost is that of the replicas that the router reads, and the values are those of a refresh on time. Age 0:
# the counts are refreshed at every read.
#
