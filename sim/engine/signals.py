"""What a replica says of itself, as old as it is when a router reads it.

An engine publishes its counts once an iteration, and whoever routes fetches them at the multiples of an age:

    fetched              |<------- age ------->|                       a read in this period sees the counts
    iterations    | 1 |  2  | 3 | 4  |   5  | 6 |   7  |               of iteration 2: the last that began
                         ^ refreshed            ^ read                 before the refresh

All replicas are fetched at the same times. Nothing is done at these times: what a refresh would have seen is
worked out when it is first read, or before the first change after it, whichever comes first. So a router pays
for the replicas it reads, and the value is that of a refresh on time. Age 0: refreshed at every read.
"""

from __future__ import annotations

from bisect import bisect_left
from math import inf, nextafter
from typing import NamedTuple

from policies.core.engine import EngineCore
from sim.engine.flight import Flight

MIN_AGE_S = 1e-6


class Counts(NamedTuple):
    """As of one iteration: when it was planned, and of blocks those that it uses."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks_used: int = 0
    num_entered: int = 0  # requests that the engine had been given
    num_entered_tokens: int = 0  # of their prompts


def check_age(age_s: float) -> None:
    """Raise ValueError for what is no age."""
    if age_s and not MIN_AGE_S <= age_s < inf:
        raise ValueError(f"signal_age_s={age_s}: must be 0 or a finite number >= {MIN_AGE_S:g} s")


class Signals:
    """The counts of one replica. Times asked for never go back."""

    def __init__(self, core: EngineCore, age_s: float) -> None:
        check_age(age_s)
        self._core = core
        self._age_s = age_s
        self._flight: Flight | None = None  # the last, until the next plan
        self._counts = Counts()  # of the last plan
        self._seen = self._counts
        self._next_s = -inf  # from when on another refresh is due

    def read(self, now: float) -> Counts:
        """What a router sees at `now`."""
        if now >= self._next_s:
            self.refresh(now)
        return self._seen

    def planned(self, flight: Flight | None, num_entered: int, num_entered_tokens: int, now: float) -> None:
        """A plan was made at `now`, perhaps that there is nothing to do."""
        if now >= self._next_s:
            self.refresh(now)
        core = self._core
        self._flight = flight
        if flight is None:
            counts = (len(core.running), core.num_waiting, core.pool.num_used)
        else:
            counts = (flight.num_running, flight.num_waiting, flight.num_blocks_used)
        self._counts = Counts(*counts, num_entered, num_entered_tokens)

    def refresh(self, now: float) -> None:
        """Work out what the last refresh has seen, if nobody has; before a flight of several is committed."""
        if now < self._next_s:
            return
        refreshed_s = now
        if self._age_s:
            period = now // self._age_s
            if period * self._age_s > now:  # the quotient was rounded
                period -= 1
            elif (period + 1) * self._age_s <= now:
                period += 1
            refreshed_s = period * self._age_s
            self._next_s = (period + 1) * self._age_s
        else:
            self._next_s = nextafter(now, inf)
        self._seen = self._as_of(refreshed_s)

    def _as_of(self, time_s: float) -> Counts:
        """Of the last iteration that began before time_s: later than the last plan, or else seen already."""
        flight, counts = self._flight, self._counts
        if flight is None or flight.num_iterations == 1:
            return counts
        num_ended = min(bisect_left(flight.ends_s, time_s), flight.num_iterations - 1)
        if not num_ended:
            return counts
        num_grown = self._core.blocks_of_repeats(flight.plan, num_ended)
        return counts._replace(num_blocks_used=counts.num_blocks_used + num_grown)
