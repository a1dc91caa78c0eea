"""Replicas that start, drain or change their role or model during a run, as policies decide.

The scaling policy of a pool is called at its interval, and replicas start or drain accordingly. Requests are
counted per pool for it, and drained replicas are removed.

Replicas also change between a prefill and a decode pool, or from model to model. Roles: a replica that is to
change is drained. When it has no requests, it leaves its pool, and its devices join the other pool at once,
as a new replica with a new index. The weights stay in memory; the cache is lost.

Models that take turns on the same GPUs, as `policies.roles` decides (vLLM's sleep mode): a turn is a
replica of the pool of its model. At its end the replica is drained. A replica of the next model then starts
in its place, and serves once the first model's weights have left the GPUs and its own are loaded. Its cache
is empty. Requests of sleeping models wait at the gateway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from functools import partial
from itertools import count
from math import inf

from simpy.events import ProcessGenerator

from policies.core.request import Request
from policies.core.sequence import Sequence
from policies.roles import ReplicaLoad, Roles, Switch, Turns
from policies.scaling import Present, Scaling, change_to, checked_interval_s, checked_target
from policies.user_code import returned
from sim.cluster.fleet import Fleet, Member, State
from sim.cluster.gateway import GatewayAttachment, RequestAttempt
from sim.engine.clock import Clock, Phase
from sim.engine.replica import Replica
from sim.engine.signals import BusyTime
from sim.metrics.slo import Slo
from sim.records.requests import RequestLog, Status


class Autoscaler:
    """The autoscaler of one pool; it is a `policies.scaling.PoolView`.

    counts: request counts of the pool. busy_times: busy seconds of all replicas, by index. cold_start_s:
    seconds from the start of a replica until it accepts requests; it is paid for from its start. on_start is
    called with every replica that is started. requests_remain: returns whether requests are in progress or
    still to arrive.
    """

    def __init__(
        self,
        policy: Scaling,
        *,
        pool_index: int,
        cold_start_s: float,
        clock: Clock,
        fleet: Fleet,
        counts: PoolCount,
        busy_times: Mapping[int, BusyTime],
        on_start: Callable[[Member], None],
        requests_remain: Callable[[], bool],
    ) -> None:
        self._policy = policy
        self._pool_index = pool_index
        self.cold_start_s = cold_start_s
        self._clock = clock
        self._fleet = fleet
        self._counts = counts
        self._busy_times = busy_times
        self._on_start = on_start
        self._requests_remain = requests_remain
        self._interval_s = checked_interval_s(policy)
        self._busy_s: dict[int, float] = {}  # by replica index, as of the last decision
        self._woken: Member | None = None  # the last one started from zero for a request
        if policy.min_replicas == 0:
            fleet.start_from_zero[pool_index] = self._start_from_zero
        clock.begin(self._decide_in_turn())

    @property
    def num_replicas(self) -> int:
        return len(self._members(State.serving))

    @property
    def num_starting(self) -> int:
        return len(self._members(State.starting))

    @property
    def num_draining(self) -> int:
        return len(self._members(State.draining))

    @property
    def max_concurrency(self) -> int | None:
        return next((m.replica.core.max_num_seqs for m in self._members(*State)), None)

    @property
    def num_outstanding(self) -> int:
        return self._sum("num_outstanding")

    @property
    def num_outstanding_tokens(self) -> int:
        return self._sum("num_outstanding_tokens")

    @property
    def num_running(self) -> int:
        return self._sum("num_running")

    @property
    def num_waiting(self) -> int:
        return self._sum("num_waiting") + self._sum("num_unseen")

    @property
    def kv_usage(self) -> float:
        serving = [member.replica for member in self._members(State.serving)]
        num_all = sum(replica.num_kv_tokens for replica in serving)
        num_free = sum(replica.num_free_kv_tokens for replica in serving)
        return (num_all - num_free) / num_all if num_all else 0.0

    @property
    def busy_share(self) -> float:
        now, period_s = self._clock.now, self._interval_s
        serving = [member.replica for member in self._members(State.serving)]
        busy_s = sum(
            self._busy_times[replica.index].seconds(now) - self._busy_s.get(replica.index, 0.0)
            for replica in serving
        )
        return busy_s / (period_s * len(serving)) if serving else 0.0

    @property
    def num_arrivals(self) -> int:
        return self._counts.num_sent

    @property
    def num_arrived_tokens(self) -> int:
        return self._counts.num_sent_tokens

    @property
    def num_ended(self) -> int:
        return self._counts.num_ended

    @property
    def num_met(self) -> int:
        return self._counts.num_met

    def _members(self, *states: State) -> list[Member]:
        return self._fleet.of_pool(self._pool_index, *states)

    def _sum(self, name: str) -> int:
        """Returns the sum of a count over the serving and draining replicas."""
        return sum(getattr(m.replica, name) for m in self._members(State.serving, State.draining))

    def _decide_in_turn(self) -> ProcessGenerator:
        """Decides at every interval while requests remain."""
        for number in count(1):
            yield self._clock.at(number * self._interval_s, Phase.control)
            if not self._requests_remain():
                return
            self._decide(self._clock.now)

    def _decide(self, now: float) -> None:
        """Starts or drains replicas as the policy decides."""
        target = checked_target(self._policy, self._policy.target(self, now))
        present = self._members(State.starting, State.serving, State.down)
        indices = [member.replica.index for member in present]
        self._busy_s = {index: self._busy_times[index].seconds(now) for index in indices}
        if target == 0 and self._is_needed():
            target = 1
        change = change_to(target, [_present(member) for member in present])
        for _ in range(change.num_starts):
            self._start()
        for member in change.drained:
            self._fleet.drain(member, now)

    def _is_needed(self) -> bool:
        """Returns whether the last replica has requests, or is starting because of one."""
        is_starting = self._woken is not None and self._woken.state is State.starting
        return is_starting or any(member.replica.num_outstanding for member in self._members(State.serving))

    def _start_from_zero(self) -> bool:
        """Starts a replica for a request that none can serve; returns False if a replica will serve again."""
        if self._members(State.starting, State.serving, State.down):
            return False
        self._woken = self._start()
        return True

    def _start(self) -> Member:
        member = self._fleet.start(self._pool_index, self._clock.now)
        self._fleet.serve_after(member, self.cold_start_s)
        self._on_start(member)
        return member


def _present(member: Member) -> Present[Member]:
    """Returns a member as `policies.scaling` sees it."""
    replica = member.replica
    return Present(member, member.state is State.serving, replica.num_outstanding, replica.index)


class PoolCount:
    """Counts of the requests sent to a pool since the run began."""

    __slots__ = ("num_ended", "num_met", "num_sent", "num_sent_tokens")

    def __init__(self) -> None:
        self.num_sent = self.num_sent_tokens = 0  # requests and their prompt tokens
        self.num_ended = self.num_met = 0  # of these, ended and within the SLO

    def ended(self, is_met: bool) -> None:
        """Counts an ended request; is_met: whether the pool's part of it met the SLO."""
        self.num_ended += 1
        self.num_met += is_met


class PoolCounts(GatewayAttachment):
    """Request counts of all pools, for runs that scale pools or transfer KV.

    slo: None if no policy reads num_met.
    """

    def __init__(self, fleet: Fleet, slo: Slo | None, requests: RequestLog, clock: Clock) -> None:
        self.of_pool = [PoolCount() for _ in fleet.pools]
        self._fleet = fleet
        self._slo = slo
        self._requests = requests
        self._clock = clock
        self._prompt_counts: dict[int, PoolCount] = {}
        """Counts of the pool to which the prompt was sent, by the id of a request in progress."""

    def sends(self, attempt: RequestAttempt, replica: Replica, request: Request) -> bool:
        self.sent(replica, request)
        self._prompt_counts[request.request_id] = self._counts(replica)
        return False

    def sent(self, replica: Replica, request: Request) -> None:
        """Counts a request that is sent to a replica."""
        counts = self._counts(replica)
        counts.num_sent += 1
        counts.num_sent_tokens += request.prompt.num_tokens

    def ends(self, attempt: RequestAttempt, replica: Replica, seq: Sequence) -> bool:
        """Counts an ended request for its pool.

        With two pools, each counts by the latencies that it determines.
        """
        slo, log, request_id = self._slo, self._requests, seq.request_id
        counts, prompt_counts = self._counts(replica), self._prompt_counts.pop(request_id, None)
        is_met = slo is None or (slo.is_met(log, request_id) and not attempt.is_timed_out)
        if prompt_counts is None or prompt_counts is counts or slo is None:
            counts.ended(is_met)
        else:
            prefill_met, decode_met = slo.stages_met(log, request_id)
            is_complete = log.status[request_id] == Status.finished and not attempt.is_timed_out
            prompt_counts.ended(prefill_met)
            counts.ended(decode_met and is_complete)
        self.released(replica)
        return False

    def left(self, attempt: RequestAttempt, now: float) -> None:
        self._prompt_counts.pop(attempt.arrival.request.request_id, None)

    def released(self, replica: Replica) -> None:
        """Handles a request that a replica no longer holds, which may end the replica's drain."""
        self._fleet.leave_if_drained(replica, self._clock.now)

    def _counts(self, replica: Replica) -> PoolCount:
        return self.of_pool[self._fleet.members[replica.index].pool_index]


class RoleSwitching:
    """Calls the roles policy at its interval while requests remain, and switches replicas."""

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
        """Calls the policy at its interval while requests remain."""
        while (interval_s := self._roles.interval_s) is not None:
            yield self._clock.at(self._clock.now + interval_s, Phase.control)
            if not self._requests_remain():
                return
            self._switch()

    def _switch(self) -> None:
        """Drains the replica chosen by the policy, if any."""
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
    """Begins and ends the turns of a run; the first pool has the first turn."""

    def __init__(self, turns: Turns, fleet: Fleet, clock: Clock) -> None:
        self._turns = turns
        self._fleet = fleet
        self._clock = clock
        self._awake = 0  # number of the pool with the current or beginning turn
        self._next: int | None = None  # number of the pool with the next turn, while this one is drained
        self._began_s = 0.0
        self._waiting_since_s: dict[int, float] = {}
        fleet.on_gone = self._on_gone
        for index in range(len(fleet.pools)):
            fleet.start_from_zero[index] = partial(self._wait, index)

    def left(self, attempt: RequestAttempt, now: float) -> None:
        """Ends the turn of a model without requests, if another model waits."""
        if self._next is not None:
            for member in self._fleet.of_pool(self._awake, State.draining):
                self._fleet.leave_if_drained(member.replica, now)
        elif self._waiting_since_s:
            self._clock.begin(self._decide_at(now))

    def _wait(self, index: int) -> bool:
        """Records that a request waits for a model that is not serving."""
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
        """Starts the next model on the GPUs of the drained one."""
        assert self._next is not None
        now, pools = self._clock.now, self._fleet.pools
        change_s = pools[self._awake].sleep_s + pools[self._next].wake_s
        self._awake, self._next = self._next, None
        starting = self._fleet.start(self._awake, now, instead_of=member)
        self._clock.begin(self._begin_turn(starting, change_s))

    def _begin_turn(self, member: Member, change_s: float) -> ProcessGenerator:
        """Begins a turn once the models have been swapped: the gateway sends it the waiting requests."""
        yield self._clock.at(self._clock.now + change_s, Phase.control)
        self._began_s = self._clock.now
        self._waiting_since_s.pop(self._awake, None)
        self._fleet.ready(member, self._clock.now)
        if self._waiting_since_s:
            self._clock.begin(self._decide_at(self._clock.now))
