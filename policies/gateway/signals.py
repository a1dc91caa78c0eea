"""The load signals of one engine as a router sees them, with the age of the service's signals.

An engine publishes its counts once per iteration, and the router fetches them at multiples of an age:

    fetched              |<------- age ------->|            a read in this period gives the counts
    iterations    | 1 |  2  | 3 | 4  |   5  | 6 |   7  |    of iteration 2: the last that began
                         ^ refreshed            ^ read      before the refresh

All replicas are refreshed at the same times. A refresh is not an event: its counts are computed at the first
read, or before the first change after it, whichever comes first. Only replicas that the router reads
therefore cost time. Age 0: the counts are refreshed at every read.
"""

from __future__ import annotations

from math import inf, nextafter
from typing import NamedTuple

from policies.core.request import Request
from policies.gateway.gateway import Now, check_age


class Counts(NamedTuple):
    """Counts when one iteration was planned; num_blocks_used includes the blocks that it takes."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks_used: int = 0
    num_entered: int = 0  # requests that had reached the engine
    num_entered_tokens: int = 0  # prompt tokens of these requests


def refresh_times_s(now: float, age_s: float) -> tuple[float, float]:
    """Returns the time of the last refresh up to now, and of the next one, in seconds. age_s must be > 0."""
    period = now // age_s
    if period * age_s > now:  # the quotient was rounded
        period -= 1
    elif (period + 1) * age_s <= now:
        period += 1
    return period * age_s, (period + 1) * age_s


class AgedSignals:
    """A `LoadSignals` of counts that an engine publishes.

    The times of reads must not decrease. clock: the router's clock. age_s: maximum age of the counts, s.
    """

    def __init__(self, clock: Now, age_s: float) -> None:
        check_age(age_s)
        self._clock = clock
        self._age_s = age_s
        self.reset()

    def reset(self) -> None:
        """Resets the signals, for an engine without requests."""
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
