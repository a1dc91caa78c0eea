"""Replicas that change between a prefill and a decode pool.

A replica that is to change is drained. When it has no requests, it leaves its pool, and its devices join the
other pool at once, as a new replica with a new index. The weights stay in memory, the cache is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from simpy.events import ProcessGenerator

from policies.roles import ReplicaLoad, Roles, Switch
from policies.user_code.decisions import returned
from sim.cluster.fleet import Fleet, Member, State
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

    def _check(self, change: object, loads: Sequence[ReplicaLoad]) -> None:
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
