"""Attachments of a replica: load counts with their age, its prefix cache, its busy time, loads of adapters.

`policies.gateway.signals` defines the counts that a router sees.

The busy time is the seconds in which a replica was running iterations, independent of how the run was cut
into leaps.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import partial

from policies.core.plan import StepPlan
from policies.core.request import Request
from policies.core.sequence import Sequence
from policies.gateway.signals import AgedSignals, Counts
from sim.engine.attachment import Attachment
from sim.engine.clock import Clock, Phase
from sim.engine.iteration_times import RunningStep
from sim.engine.replica import Replica


class Signals(AgedSignals, Attachment):
    """The `LoadSignals` of one replica, also in the middle of a leap."""

    def __init__(self, replica: Replica, clock: Clock, age_s: float) -> None:
        self._replica = replica
        super().__init__(clock, age_s)

    def reset(self) -> None:
        super().reset()
        self._num_entered = self._num_entered_tokens = 0  # requests that have reached the engine
        self._step: RunningStep | None = None  # the latest step, until the next plan

    def entered(self, seq: Sequence) -> None:
        self._num_entered += 1
        self._num_entered_tokens += seq.num_prompt_tokens

    def started(self, step: RunningStep | None, now: float) -> None:
        core = self._replica.core
        counts = (len(core.running), core.num_waiting, core.block_pool.num_used)
        self.publish(Counts(*counts, self._num_entered, self._num_entered_tokens), now)
        self._step = step

    def ending(self, step: RunningStep, now: float) -> None:
        self.refresh(now)

    def crashed(self, now: float) -> None:
        self.reset()

    def _as_of(self, time_s: float) -> Counts:
        step, counts = self._step, self._counts
        if step is None or len(step.ends_s) == 1:
            return counts
        num_ended = min(bisect_left(step.ends_s, time_s), len(step.ends_s) - 1)
        if not num_ended:
            return counts
        num_grown = self._replica.core.blocks_of_repeats(step.plan, num_ended)
        return counts._replace(num_blocks_used=counts.num_blocks_used + num_grown)


class CacheView(Attachment):
    """A `CacheReader`: the cache at the start of the latest iteration, also in the middle of a leap."""

    def __init__(self, replica: Replica, clock: Clock) -> None:
        self._replica = replica
        self._clock = clock

    def num_cached(self, request: Request) -> int:
        """Returns the number of tokens of a prompt that are cached."""
        self.before_external_event()
        core = self._replica.core
        return core.block_pool.peek(request) if core.ranks is None else core.ranks.peek(request)

    def before_external_event(self) -> None:
        """Cuts a leap after the finished iterations, if they have changed the content of the cache.

        The cut must precede the external event, because the plan made at the cut must not depend on the
        event.
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
