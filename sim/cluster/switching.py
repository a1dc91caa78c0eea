"""Replicas that change what they serve: between a prefill and a decode pool, or from model to model.

Roles: a replica that is to change is drained. When it has no requests, it leaves its pool, and its devices
join the other pool at once, as a new replica with a new index. The weights stay in memory, the cache is lost.

Models that take turns on the same GPUs, as `policies.roles` decides (vLLM's sleep mode): a turn is a
replica of the pool of its model. At its end the replica is drained; then a replica of the next model starts
in its place, and serves once the first model's weights have left the GPUs and its own are there. Its cache is
empty. Requests of models that sleep wait at the gateway.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial
from math import inf

from simpy.events import ProcessGenerator

from policies.roles import ReplicaLoad, Roles, Switch, Turns
from policies.user_code import returned
from sim.cluster.fleet import Fleet, Member, State
from sim.cluster.gateway import GatewayAttachment, RequestAttempt
from sim.engine.clock import Clock, Phase
from sim.engine.replica import Replica


class RoleSwitching:
    """Calls the roles policy at its interval for as long as requests remain, and switches replicas."""

    def __init__(
        self, *, roles: Roles, fleet: Fleet, clock: Clock, requests_remain: Callable[[], bool]
    ) -> None:
        self._roles = roles
        self._fleet = fleet
        self._clock = clock
        self._requests_remain = requests_remain
        self._changing: dict[int, int] = {}  # replica index -> index of its next pool
        self._pools = {pool.role: index for index, pool in enumerate(fleet.pools) if pool.role != "mixed"}
        fleet.on_gone = self._on_gone
        clock.begin(self._switch_in_turn())

    def _switch_in_turn(self) -> ProcessGenerator:
        """Asks the policy at its interval, for as long as requests remain."""
        while (interval_s := self._roles.interval_s) is not None:
            yield self._clock.at(self._clock.now + interval_s, Phase.control)
            if not self._requests_remain():
                return
            self._switch()

    def _switch(self) -> None:
        """Drains the replica that is to change, if the policy names one."""
        members = [
            member
            for pool_index in self._pools.values()
            for member in self._fleet.of_pool(pool_index, State.serving, State.draining)
        ]
        loads = [self._load(member) for member in sorted(members, key=lambda member: member.replica.index)]
        change = self._roles.switch(loads, self._clock.now)
        if change is not None:
            self._check(change, loads)
            self._changing[change.name] = self._pools[change.role]
            self._fleet.drain(self._fleet.members[change.name], self._clock.now)

    def _check(self, change: object, loads: SequenceOf[ReplicaLoad]) -> None:
        """Raises WrongDecisionError unless a change names a replica and a role of the run."""
        names = [load.name for load in loads]
        if not isinstance(change, Switch) or change.name not in names or change.role not in self._pools:
            rule = (
                f"must return None, or a policies.roles.Switch with a name of {names} and a role of "
                f"{list(self._pools)}"
            )
            raise returned(self._roles, "switch", change, rule)

    def _load(self, member: Member) -> ReplicaLoad:
        replica: Replica = member.replica
        pool = self._changing.get(replica.index, member.pool_index)
        return ReplicaLoad(
            name=replica.index,
            role=self._fleet.pools[pool].role,
            is_changing=member.state is State.draining,
            num_outstanding=replica.num_outstanding,
            num_queued_tokens=replica.num_queued_tokens,
            kv_use_share=1 - (replica.num_free_kv_tokens - replica.num_unseen_tokens) / replica.num_kv_tokens,
        )

    def _on_gone(self, member: Member) -> None:
        """Adds the devices of a replica that has left its pool to the other pool."""
        pool_index = self._changing.pop(member.replica.index, None)
        if pool_index is not None:
            self._fleet.ready(
                self._fleet.start(pool_index, self._clock.now, instead_of=member), self._clock.now
            )


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
