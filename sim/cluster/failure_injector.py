"""Injects failures into the replicas of a fleet, and ends them.

Failures of one replica may overlap: it is down while any crash lasts, and slow by all factors together. A
crash of a replica that has not started yet, or is gone, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf, isinf, prod

from simpy.events import ProcessGenerator

from sim.cluster.failures import Failures
from sim.cluster.fleet import Fleet, Member, State
from sim.engine.clock import Clock, Phase
from sim.records.failure import Failure, FailureKind

_FATAL = (FailureKind.crash, FailureKind.host_out_of_memory)


class FailureInjector:
    """Injects the failures of a run.

    on_lost is called with the id of every request that a crash has lost. requests_remain: returns whether
    requests are in progress or still to arrive.
    """

    def __init__(
        self,
        failures: Failures,
        *,
        clock: Clock,
        fleet: Fleet,
        seed: int,
        on_lost: Callable[[int], None],
        requests_remain: Callable[[], bool],
    ) -> None:
        self._failures = failures
        self._clock = clock
        self._fleet = fleet
        self._seed = seed
        self._on_lost = on_lost
        self._requests_remain = requests_remain
        self.happened: list[Failure] = []
        self._active: dict[int, list[Failure]] = {}  # by replica index
        self._pools: dict[str, list[int]] = {pool.name: [] for pool in fleet.pools}
        if failures.events:
            for member in fleet.members:
                self.add(member)

    def add(self, member: Member) -> None:
        """Adds a replica of the fleet, to which failures may happen from now on."""
        if self._failures.events:
            index = member.replica.index
            self._pools[member.replica.pool.name].append(index)
            self._active[index] = []
            own = self._failures.of_replica(self._seed, index, inf, self._pools)
            ahead = (failure for failure in own if failure.at_s >= self._clock.now)
            self._clock.begin(self._fail_in_turn(member, ahead))

    def _fail_in_turn(self, member: Member, failures: Iterator[Failure]) -> ProcessGenerator:
        """Lets the failures of a replica happen; each is drawn when the one before it begins."""
        for failure in failures:
            yield self._clock.at(failure.at_s, Phase.control)
            if not self._requests_remain() or member.state is State.gone:
                return
            if failure.kind not in _FATAL or member.state is not State.starting:
                self._clock.begin(self._fail(member, failure))

    def _fail(self, member: Member, failure: Failure) -> ProcessGenerator:
        """Lets one failure happen: it is in force for its duration."""
        self.begin(member, failure)
        yield self._clock.at(self._clock.now + failure.duration_s, Phase.control)
        self.end(member, failure)

    def begin(self, member: Member, failure: Failure) -> None:
        """Begins a failure, which is in force until `end`."""
        self.happened.append(failure)
        self._active.setdefault(failure.replica, []).append(failure)
        self._apply(member)

    def end(self, member: Member, failure: Failure) -> None:
        """Ends a failure that has begun; one without a known duration has one now."""
        self._active[failure.replica].remove(failure)
        if isinf(failure.duration_s):
            lasted_s = self._clock.now - failure.at_s
            self.happened[self.happened.index(failure)] = failure._replace(duration_s=lasted_s)
        self._apply(member)

    def _apply(self, member: Member) -> None:
        """Applies the active failures to a replica."""
        failures = self._active[member.replica.index]
        kinds = [failure.kind for failure in failures]
        now = self._clock.now
        if any(kind in kinds for kind in _FATAL):
            for request_id in self._fleet.crash(member, now):
                self._on_lost(request_id)
        else:
            self._fleet.restore(member, now)
        self._fleet.set_reached(member, is_reached=FailureKind.link_down not in kinds)
        member.replica.slow_down(prod(f.factor for f in failures if f.kind is FailureKind.straggler))
        self._fleet.slow_links(member, prod(f.factor for f in failures if f.kind is FailureKind.link_slow))
