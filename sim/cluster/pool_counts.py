"""Counts the requests that each pool was sent, for autoscalers, and removes drained replicas."""

from __future__ import annotations

from policies.core.request import Request
from policies.core.sequence import Sequence
from sim.cluster.fleet import Fleet
from sim.cluster.gateway_attachment import GatewayAttachment
from sim.cluster.request_attempt import RequestAttempt
from sim.engine.clock import Clock
from sim.engine.replica import Replica
from sim.metrics.slo import Slo
from sim.records.requests import RequestLog


class PoolCount:
    """Counts of the requests that a pool was sent since the run began."""

    __slots__ = ("num_ended", "num_met", "num_sent", "num_sent_tokens")

    def __init__(self) -> None:
        self.num_sent = self.num_sent_tokens = 0  # requests and their prompt tokens
        self.num_ended = self.num_met = 0  # of these, ended and within the SLO


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

    def sends(self, attempt: RequestAttempt, replica: Replica, request: Request) -> bool:
        self.sent(replica, request)
        return False

    def sent(self, replica: Replica, request: Request) -> None:
        """Counts a request that is sent to a replica."""
        counts = self.of_pool[self._fleet.members[replica.index].pool_index]
        counts.num_sent += 1
        counts.num_sent_tokens += request.prompt.num_tokens

    def ends(self, attempt: RequestAttempt, replica: Replica, seq: Sequence) -> bool:
        is_met = self._slo is None or self._slo.is_met(self._requests, seq.request_id)
        self.ended(replica, is_met and not attempt.is_timed_out)
        return False

    def ended(self, replica: Replica, is_met: bool) -> None:
        """Counts a request that has ended on a replica; is_met: whether it met the SLO."""
        counts = self.of_pool[self._fleet.members[replica.index].pool_index]
        counts.num_ended += 1
        counts.num_met += is_met
        self._fleet.leave_if_drained(replica, self._clock.now)
