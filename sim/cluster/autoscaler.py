"""Calls the scaling policy of a pool at its interval, and starts or drains replicas accordingly.

The requests that each pool was sent are counted for it, and drained replicas are removed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count

from simpy.events import ProcessGenerator

from policies.core.request import Request
from policies.core.sequence import Sequence
from policies.scaling import Scaling, checked_interval_s, checked_target
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
    seconds from the start of a replica until it accepts requests; it is paid for from its start on. on_start
    is called with every replica that is started. requests_remain: returns whether requests are in progress or
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
        self._woken: Member | None = None  # started last from zero because a request had arrived
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
        """Decides at every interval for as long as requests remain."""
        for number in count(1):
            yield self._clock.at(number * self._interval_s, Phase.control)
            if not self._requests_remain():
                return
            self._decide(self._clock.now)

    def _decide(self, now: float) -> None:
        """Starts or drains as many replicas as the policy says."""
        target = checked_target(self._policy, self._policy.target(self, now))
        present = self._members(State.starting, State.serving, State.down)
        indices = [member.replica.index for member in present]
        self._busy_s = {index: self._busy_times[index].seconds(now) for index in indices}
        if target == 0 and self._is_needed():
            target = 1
        for _ in range(target - len(present)):
            self._start()
        for member in sorted(present, key=_drain_rank, reverse=True)[: max(0, len(present) - target)]:
            self._fleet.drain(member, now)

    def _is_needed(self) -> bool:
        """Returns whether the last replica has requests, or is starting because of one."""
        is_starting = self._woken is not None and self._woken.state is State.starting
        return is_starting or any(member.replica.num_outstanding for member in self._members(State.serving))

    def _start_from_zero(self) -> bool:
        """Starts a replica for a request that none can serve; returns false if one will serve again."""
        if self._members(State.starting, State.serving, State.down):
            return False
        self._woken = self._start()
        return True

    def _start(self) -> Member:
        member = self._fleet.start(self._pool_index, self._clock.now)
        self._fleet.serve_after(member, self.cold_start_s)
        self._on_start(member)
        return member


def _drain_rank(member: Member) -> tuple[bool, int, int]:
    """Returns the sort key of a member; the largest is drained first.

    Order: replicas that do not serve, then those with the fewest outstanding requests, then the newest.
    """
    return member.state is not State.serving, -member.replica.num_outstanding, member.replica.index


class PoolCount:
    """Counts of the requests that a pool was sent since the run began."""

    __slots__ = ("num_ended", "num_met", "num_sent", "num_sent_tokens")

    def __init__(self) -> None:
        self.num_sent = self.num_sent_tokens = 0  # requests and their prompt tokens
        self.num_ended = self.num_met = 0  # of these, ended and within the SLO

    def ended(self, is_met: bool) -> None:
        """Counts a request that has ended; is_met: whether the pool's part of it met the SLO."""
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
        """Counts an ended request for its pool; of two pools, each by the latencies that it decides."""
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
        """Handles a request that a replica does not hold any more, which may end the replica's drain."""
        self._fleet.leave_if_drained(replica, self._clock.now)

    def _counts(self, replica: Replica) -> PoolCount:
        return self.of_pool[self._fleet.members[replica.index].pool_index]
