"""Models that take turns on the same GPUs, as `policies.roles.turns` decides: vLLM's sleep mode.

A turn is a replica of the pool of its model. At its end the replica is drained; then a replica of the next
model starts in its place, and serves once the first model's weights have left the GPUs and its own are there.
Its cache is empty. Requests of models that sleep wait at the gateway.
"""

from __future__ import annotations

from functools import partial
from math import inf

from simpy.events import ProcessGenerator

from policies.roles.turns import Turns
from sim.cluster.fleet import Fleet, Member, State
from sim.cluster.gateway_attachment import GatewayAttachment
from sim.cluster.request_attempt import RequestAttempt
from sim.engine.clock import Clock, Phase


class ModelTurns(GatewayAttachment):
    """Begins and ends the turns of a run, of which the first is that of the first pool."""

    def __init__(self, turns: Turns, fleet: Fleet, clock: Clock) -> None:
        self._turns = turns
        self._fleet = fleet
        self._clock = clock
        self._awake = 0  # number of the pool that has the turn, or gets it
        self._next: int | None = None  # number of the pool that gets the next turn, while this one is drained
        self._began_s = 0.0
        self._waiting_since_s: dict[int, float] = {}
        fleet.on_gone = self._on_gone
        for index in range(len(fleet.pools)):
            fleet.start_from_zero[index] = partial(self._wait, index)

    def left(self, attempt: RequestAttempt, now: float) -> None:
        """Ends the turn of a model without requests, if another one waits."""
        if self._next is not None:
            for member in self._fleet.of_pool(self._awake, State.draining):
                self._fleet.leave_if_drained(member.replica, now)
        elif self._waiting_since_s:
            self._clock.begin(self._decide_at(now))

    def _wait(self, index: int) -> bool:
        """Notes that a request waits for a model that does not serve now."""
        now = self._clock.now
        self._waiting_since_s.setdefault(index, now)
        self._clock.begin(self._decide_at(now))
        return True

    def _decide_at(self, time_s: float) -> ProcessGenerator:
        """Ends the turn if it may end at time_s, or decides again when it may."""
        while time_s < inf:
            yield self._clock.at(time_s, Phase.control)
            time_s = self._end_turn()

    def _end_turn(self) -> float:
        """Ends the turn if it may end now; returns when to decide again, s; inf: when a request waits."""
        members = self._fleet.of_pool(self._awake, State.serving)
        if not members:  # the turn is about to begin or to end
            return inf
        now, [member] = self._clock.now, members
        is_busy = member.replica.num_outstanding > 0
        ends_s = self._turns.ends_s(self._waiting_since_s, is_busy, self._began_s)
        if ends_s <= now:
            self._next = self._turns.next_model(self._waiting_since_s)
            self._fleet.drain(member, now)
            return inf
        return ends_s if self._waiting_since_s else inf

    def _on_gone(self, member: Member) -> None:
        """Starts the next model on the GPUs of the one that has ended its last request."""
        assert self._next is not None
        now, pools = self._clock.now, self._fleet.pools
        change_s = pools[self._awake].sleep_s + pools[self._next].wake_s
        self._awake, self._next = self._next, None
        starting = self._fleet.start(self._awake, now, instead_of=member)
        self._clock.begin(self._begin_turn(starting, change_s))

    def _begin_turn(self, member: Member, change_s: float) -> ProcessGenerator:
        """Begins a turn once the models have changed places: the gateway sends it the requests that wait."""
        yield self._clock.at(self._clock.now + change_s, Phase.control)
        self._began_s = self._clock.now
        self._waiting_since_s.pop(self._awake, None)
        self._fleet.ready(member, self._clock.now)
        if self._waiting_since_s:
            self._clock.begin(self._decide_at(self._clock.now))
