"""Calls the scaling policy of a fleet, and starts, wakes, drains and puts to sleep engines as it says.

The policy is that of the simulator. A start takes as long as a process needs to load its weights, and a
wake-up as long as the weights need to come back from host memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from policies.core.request import Request
from policies.gateway.gateway import GatewayAttachment, Now, RequestAttempt
from policies.scaling import Present, Scaling, change_to, checked_interval_s, checked_target
from realengine.fleet.fleet import Fleet
from realengine.fleet.process import EngineOfFleet
from realengine.fleet.replica import EngineReplica, State
from realengine.fleet.request import FleetRequest

_LOG = logging.getLogger("windtunnel.fleet")


class Autoscaler(GatewayAttachment[EngineReplica, FleetRequest, Request]):
    """A `policies.scaling.PoolView` of a fleet, and the calls of its policy.

    specs: one per engine that may serve at the same time, each with its own devices. sleep_level: engines
    that are not needed sleep; None: their processes end.
    """

    def __init__(
        self,
        policy: Scaling,
        fleet: Fleet,
        specs: Sequence[EngineOfFleet],
        *,
        sleep_level: int | None,
        clock: Now,
    ) -> None:
        self._policy = policy
        self._fleet = fleet
        self._specs = list(specs)
        self._sleep_level = sleep_level
        self._clock = clock
        self._interval_s = checked_interval_s(policy)
        self._busy_s: dict[int, float] = {}  # by index, as of the last decision
        self.num_arrivals = self.num_arrived_tokens = self.num_ended = 0
        if policy.min_replicas == 0:
            fleet.start_from_zero = self._start_from_zero

    async def run(self) -> None:
        """Decides at every interval, until the fleet stops."""
        while not self._fleet.is_stopping:
            await asyncio.sleep(self._interval_s)
            self.decide(self._clock.now)

    # What the policy sees.

    @property
    def num_replicas(self) -> int:
        return len(self._fleet.of(State.serving))

    @property
    def num_starting(self) -> int:
        return len(self._fleet.of(State.starting, State.waking))

    @property
    def num_draining(self) -> int:
        return len(self._fleet.of(State.draining))

    @property
    def cold_start_s(self) -> float:
        """Seconds of the last start or wake-up."""
        return self._fleet.last_start_s

    @property
    def max_concurrency(self) -> int | None:
        return next((each.spec.settings.max_num_seqs for each in self._fleet.replicas), None)

    @property
    def num_outstanding(self) -> int:
        return sum(each.num_outstanding for each in self._working)

    @property
    def num_outstanding_tokens(self) -> int:
        return sum(each.num_outstanding_tokens for each in self._working)

    @property
    def num_running(self) -> int:
        return sum(each.num_running for each in self._working)

    @property
    def num_waiting(self) -> int:
        return sum(each.num_waiting + each.num_unseen for each in self._working)

    @property
    def kv_usage(self) -> float:
        serving = self._fleet.of(State.serving)
        num_all = sum(each.num_kv_tokens for each in serving)
        num_free = sum(each.num_free_kv_tokens for each in serving)
        return (num_all - num_free) / num_all if num_all else 0.0

    @property
    def busy_share(self) -> float:
        serving = self._fleet.of(State.serving)
        busy_s = sum(each.busy_s - self._busy_s.get(each.index, 0.0) for each in serving)
        return busy_s / (self._interval_s * len(serving)) if serving else 0.0

    @property
    def num_met(self) -> int:
        """All ended requests: the gateway of a fleet has no SLO."""
        return self.num_ended

    @property
    def _working(self) -> list[EngineReplica]:
        return self._fleet.of(State.serving, State.draining)

    # What the gateway does.

    def sends(
        self, attempt: RequestAttempt[EngineReplica, FleetRequest], replica: EngineReplica, request: Request
    ) -> bool:
        self.num_arrivals += 1
        self.num_arrived_tokens += request.prompt.num_tokens
        return False

    def ends(
        self, attempt: RequestAttempt[EngineReplica, FleetRequest], replica: EngineReplica, seq: Request
    ) -> bool:
        self.num_ended += 1
        return False

    # Decisions.

    def decide(self, now: float) -> None:
        """Starts or drains as many engines as the policy says."""
        fleet = self._fleet
        if fleet.is_stopping or fleet.is_paused:
            return
        target = checked_target(self._policy, self._policy.target(self, now))
        self._busy_s = {each.index: each.busy_s for each in fleet.replicas}
        present = fleet.of(State.starting, State.waking, State.serving, State.down)
        if target == 0 and (self.num_starting or any(each.num_outstanding for each in present)):
            target = 1
        change = change_to(
            target,
            [
                Present(each, each.state is State.serving, each.num_outstanding, each.index)
                for each in present
            ],
        )
        for _ in range(change.num_starts):
            self._start()
        for replica in change.drained:
            if replica.state is State.serving:
                fleet.drain(replica, self._sleep_level)
            elif replica.state is State.starting:
                fleet.end(replica)

    def _start(self) -> bool:
        """Wakes an engine that sleeps, else starts one on devices that are free; returns whether it did."""
        fleet = self._fleet
        asleep = fleet.of(State.asleep)
        if asleep:
            fleet.wake(asleep[0])
            return True
        used = [id(each.spec) for each in fleet.replicas if each.state is not State.gone]
        free = [spec for spec in self._specs if id(spec) not in used]
        if not free:
            return False  # its devices are those of an engine that drains
        fleet.add(free[0])
        _LOG.info("an engine starts: %d serve", self.num_replicas)
        return True

    def _start_from_zero(self) -> bool:
        """Starts an engine for a request that none can serve; returns whether one will serve."""
        return self._start()
