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
from sim.records.requests import RequestLog, Status


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
