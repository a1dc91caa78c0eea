"""Lets troubles happen to the replicas of a fleet, and end.

Troubles of one replica may overlap: it is down while any crash lasts, and slow by all factors together. A
crash of a replica that has not started yet, or is gone, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import inf, prod

from sim.cluster.fleet import Fleet, Member, State
from sim.cluster.troubles import Troubles
from sim.engine.clock import Clock, Phase
from sim.records.trouble import Kind, Trouble

_FATAL = (Kind.crash, Kind.host_out_of_memory)


class Incidents:
    """on_lost is called with the id of every request that a crash has lost. goes_on: whether the run does."""

    def __init__(
        self,
        troubles: Troubles,
        *,
        clock: Clock,
        fleet: Fleet,
        seed: int,
        on_lost: Callable[[int], None],
        goes_on: Callable[[], bool],
    ) -> None:
        self._troubles = troubles
        self._clock = clock
        self._fleet = fleet
        self._seed = seed
        self._on_lost = on_lost
        self._goes_on = goes_on
        self.happened: list[Trouble] = []
        self._under_way: dict[int, list[Trouble]] = {}  # by replica
        self._pools: dict[str, list[int]] = {pool.name: [] for pool in fleet.pools}
        if troubles.events:
            for member in fleet.members:
                self.joins(member)

    def joins(self, member: Member) -> None:
        """A replica that troubles may happen to from now on."""
        if self._troubles.events:
            index = member.replica.index
            self._pools[member.replica.pool.name].append(index)
            self._under_way[index] = []
            own = self._troubles.of_replica(self._seed, index, inf, self._pools)
            self._expect(member, (trouble for trouble in own if trouble.at_s >= self._clock.now))

    def _expect(self, member: Member, troubles: Iterator[Trouble]) -> None:
        """Wait for a replica's next trouble; only one is known ahead."""
        trouble = next(troubles, None)
        if trouble is not None:
            self._clock.at(trouble.at_s, Phase.control, partial(self._begin, member, trouble, troubles))

    def _begin(self, member: Member, trouble: Trouble, more: Iterator[Trouble], event: int) -> None:
        if not self._goes_on() or member.state is State.gone:
            return  # nor do later ones: the clock would never stop
        if trouble.kind not in _FATAL or member.state is not State.starting:
            self.happened.append(trouble)
            self._under_way[trouble.replica].append(trouble)
            self._apply(member)
            end_s = self._clock.now + trouble.duration_s
            self._clock.at(end_s, Phase.control, partial(self._end, member, trouble))
        self._expect(member, more)

    def _end(self, member: Member, trouble: Trouble, event: int) -> None:
        self._under_way[trouble.replica].remove(trouble)
        self._apply(member)

    def _apply(self, member: Member) -> None:
        """Let a replica be as the troubles under way make it."""
        troubles = self._under_way[member.replica.index]
        kinds = [trouble.kind for trouble in troubles]
        now = self._clock.now
        if any(kind in kinds for kind in _FATAL):
            for request_id in self._fleet.crash(member, now):
                self._on_lost(request_id)
        else:
            self._fleet.restore(member, now)
        self._fleet.reach(member, is_reached=Kind.link_down not in kinds)
        member.replica.slow_down(prod(t.factor for t in troubles if t.kind is Kind.straggler))
        self._fleet.slow_links(member, prod(t.factor for t in troubles if t.kind is Kind.link_slow))
