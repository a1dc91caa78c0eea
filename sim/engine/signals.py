"""Attachments of a replica: load counts with their age, its prefix cache, its busy time, loads of adapters.

An engine publishes its counts once per iteration, and the router fetches them at multiples of an age:

    fetched              |<------- age ------->|                       a read in this period gives the counts
    iterations    | 1 |  2  | 3 | 4  |   5  | 6 |   7  |               of iteration 2: the last that began
                         ^ refreshed            ^ read                 before the refresh

All replicas are refreshed at the same times. No event happens at these times: the counts that a refresh would
have fetched are computed at the first read, or before the first change after it, whichever comes first. So
the cost is that of the replicas that the router reads, and the values are those of a refresh on time. Age 0:
the counts are refreshed at every read.

The busy time is the seconds in which a replica was running iterations, independent of how the run was cut
into leaps.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import partial
from math import inf, nextafter
from typing import NamedTuple

from policies.core.plan import StepPlan
from policies.core.request import Request
from policies.core.sequence import Sequence
from sim.engine.attachment import Attachment
from sim.engine.clock import Clock, Phase
from sim.engine.iteration_times import RunningStep
from sim.engine.replica import Replica

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


class Signals(Attachment):
    """The `LoadSignals` of one replica. The times of reads must not decrease."""

    def __init__(self, replica: Replica, clock: Clock, age_s: float) -> None:
        check_age(age_s)
        self._replica = replica
        self._clock = clock
        self._age_s = age_s
        self._reset()

    def _reset(self) -> None:
        self._num_sent = self._num_sent_tokens = 0  # requests sent since the engine started
        self._num_entered = self._num_entered_tokens = 0  # of these, those that have reached the engine
        self._step: RunningStep | None = None  # the latest step, until the next plan
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
        self._num_sent += 1
        self._num_sent_tokens += request.prompt.num_tokens

    def entered(self, seq: Sequence) -> None:
        self._num_entered += 1
        self._num_entered_tokens += seq.num_prompt_tokens

    def started(self, step: RunningStep | None, now: float) -> None:
        self._refresh(now)
        core = self._replica.core
        self._step = step
        counts = (len(core.running), core.num_waiting, core.block_pool.num_used)
        self._counts = Counts(*counts, self._num_entered, self._num_entered_tokens)

    def ending(self, step: RunningStep, now: float) -> None:
        self._refresh(now)

    def crashed(self, now: float) -> None:
        self._reset()

    def _read(self) -> Counts:
        """Returns the counts that a router sees now."""
        now = self._clock.now
        if now >= self._next_s:
            self._refresh(now)
        return self._seen

    def _refresh(self, now: float) -> None:
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
        step, counts = self._step, self._counts
        if step is None or len(step.ends_s) == 1:
            return counts
        num_ended = min(bisect_left(step.ends_s, time_s), len(step.ends_s) - 1)
        if not num_ended:
            return counts
        num_grown = self._replica.core.blocks_of_repeats(step.plan, num_ended)
        return counts._replace(num_blocks_used=counts.num_blocks_used + num_grown)


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


class BusyTime(Attachment):
    """Adds up periods without a pause, so that leaping and stepping give bit-identical sums."""

    def __init__(self) -> None:
        self._before_s = 0.0  # in the periods before the last
        self._from_s = self._until_s = 0.0  # the last period
        self._step: RunningStep | None = None

    def seconds(self, now: float) -> float:
        """Returns the seconds up to `now` in which an iteration was running."""
        until_s = self._until_s if self._step is None else now
        return self._before_s + (until_s - self._from_s)

    def started(self, step: RunningStep | None, now: float) -> None:
        if step is not None and self._step is None and now != self._until_s:
            self._before_s += self._until_s - self._from_s
            self._from_s = now
        self._step = step

    def ending(self, step: RunningStep, now: float) -> None:
        self._until_s, self._step = step.end_s, None

    def crashed(self, now: float) -> None:
        if self._step is not None:
            self._until_s, self._step = now, None


class AdapterLoads(Attachment):
    """Begins the adapter loads that plans request, and reports each one to the engine when it is complete."""

    def __init__(self, replica: Replica, clock: Clock) -> None:
        self._replica = replica
        self._clock = clock

    def planned(self, plan: StepPlan | None, now: float) -> None:
        replica = self._replica
        for load in replica.core.take_adapter_loads():
            done_s = replica.copies.links.load(load, now)
            replica.schedule(done_s, Phase.arrive, partial(self._loaded, load.name))

    def _loaded(self, name: str) -> None:
        """Reports to the engine that an adapter is loaded, so that the sequences that wait for it can run."""
        replica = self._replica
        replica.before_external_event()
        assert replica.core.residents is not None
        for seq in replica.core.residents.waiters(name):
            replica.recorder.events.loaded(seq, self._clock.now)
        replica.core.adapter_loaded(name)
        replica.replan()
