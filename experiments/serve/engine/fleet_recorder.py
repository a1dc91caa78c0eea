"""Records what a fleet of engines does with requests, as its gateway sees it; iterations are not recorded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from experiments.serve.engine.recorder import STEP, iterations_table
from experiments.serve.engine.request_records import RequestRecords
from policies.core.request import Request
from policies.gateway.signals import Counts
from realengine.fleet.async_fleet import AsyncFleet
from realengine.fleet.replica import EngineReplica
from realengine.fleet.request import FleetRequest
from realengine.serving.answer import DraftCounts
from sim.records.requests import Status
from sim.records.run import Failure, FailureKind, PoolRecord, ReplicaRecord, RunRecords


class FleetRecorder:
    """A `GatewayLog` and an observer of a fleet. max_bytes: memory after which nothing more is recorded.

    Tokens have the times at which the gateway reads them.
    """

    def __init__(self, fleet: AsyncFleet, max_bytes: float) -> None:
        self.num_resends = 0
        self.drafts = DraftCounts([])
        """Draft tokens are not counted in a fleet."""
        self._fleet = fleet
        self._requests = RequestRecords(max_bytes, lambda: fleet.now)

    @property
    def full_s(self) -> float | None:
        """Time, since the start, at which the memory was full; None: everything is recorded."""
        return self._requests.full_s

    @property
    def num_requests(self) -> int:
        """Number of recorded requests."""
        return len(self._requests)

    # What the gateway does.

    def arrive(self, request: Request) -> None:
        sizes = [each.sizes.max_model_len for each in self._fleet.fleet.replicas if each.sizes is not None]
        room = max(1, max(sizes, default=1) - request.prompt.num_tokens)
        self._requests.arrive(request, request.max_tokens or room)

    def begin_try(self, request_id: int, number: int) -> None:
        if request_id in self._requests:
            self._requests.log.begin_try(request_id, number)

    def send(self, request_id: int, replica: int) -> None:
        if request_id in self._requests:
            self._requests.log.send(request_id, replica)

    def hold(self, request_id: int, held_s: float) -> None:
        if request_id in self._requests:
            self._requests.log.hold(request_id, held_s)

    def fail(self, reason: str) -> None:
        self._requests.log.fail(reason)

    def reject(self, request_id: int, reason: str, now: float) -> None:
        self._requests.end(request_id, Status.rejected, now, reason)

    def abandon(self, request_id: int, now: float) -> None:
        self._requests.end(request_id, Status.aborted, now)

    def lose(self, request_id: int, *, in_crash: bool) -> None:
        if request_id not in self._requests:
            return
        times_s, log = self._requests.times_s[request_id], self._requests.log
        if times_s:
            log.first_token_s[request_id], log.output_tokens[request_id] = times_s[0], len(times_s)
        log.lose(request_id, in_crash=in_crash)
        del times_s[:]

    def forget_kv_transfer(self, request_id: int) -> None:
        pass

    # What the engines do.

    def emitted(self, own: FleetRequest, replica: EngineReplica, num_tokens: int, now: float) -> None:
        self._requests.emitted(own.number, num_tokens, now)

    def ended(self, own: FleetRequest, replica: EngineReplica, now: float) -> None:
        reasons = {output.finish_reason for output in own.outputs}
        is_complete = reasons <= {"stop", "length"}
        reason = "length" if own.outputs[0].finish_reason == "length" else ""
        self._requests.end(own.number, Status.finished if is_complete else Status.aborted, now, reason)

    def stepped(self, replica: EngineReplica) -> None:
        pass

    def began(self, replica: EngineReplica, counts: Counts) -> None:
        pass

    def traffic_table(self) -> pd.DataFrame:
        """Returns the requests for `workload=recording`; call it after `records`."""
        return self._requests.traffic_table({})

    def records(self) -> RunRecords:
        """Returns the records since the start, in seconds from it; call it once, at the end."""
        end_s = self._requests.end_s()
        gaps, requests = self._requests.gaps(), self._requests.table(end_s)
        replicas, log = self._fleet.fleet.replicas, self._requests.log
        sizes = next(each.sizes for each in replicas if each.sizes is not None)
        return RunRecords(
            requests=requests,
            iterations=iterations_table(np.zeros(0, STEP), self._requests.start_s),
            gap_s=(gaps["end_s"] - gaps["since_s"]).to_numpy(),
            gap_count=np.ones(len(gaps), np.int64),
            gap_end_s=gaps["end_s"].to_numpy(),
            pools=(PoolRecord(sizes.num_blocks, sizes.block_size),),
            replicas=tuple(self._replica_record(each, end_s) for each in replicas),
            failures=tuple(self._failures(replicas)),
            end_s=end_s,
            own_gaps=gaps,
            num_lost_first_tokens=log.num_lost_first_tokens,
            num_crash_tokens=log.num_crash_tokens,
            num_resends=self._fleet.log.num_resends,
            failed_attempts=dict(log.failed_attempts),
        )

    def _replica_record(self, replica: EngineReplica, end_s: float) -> ReplicaRecord:
        """Returns the record of an engine up to end_s, in seconds from the start of the records."""

        def since_start(time_s: float | None) -> float | None:
            return None if time_s is None else min(end_s, max(0.0, time_s - self._requests.start_s))

        gone_s = since_start(replica.gone_s)
        downs = ((since_start(down_s), since_start(up_s)) for down_s, up_s in replica.down)
        return ReplicaRecord(
            0,
            since_start(replica.added_s) or 0.0,
            end_s if gone_s is None else gone_s,
            since_start(replica.ready_s),
            since_start(replica.drain_s),
            tuple((down_s or 0.0, up_s or 0.0) for down_s, up_s in downs),
        )

    def _failures(self, replicas: Sequence[EngineReplica]) -> list[Failure]:
        """Returns the ends of processes, each until the next process serves, in order of time."""
        start_s, now = self._requests.start_s, self._fleet.now
        return sorted(
            Failure(down_s - start_s, each.index, 0, FailureKind.crash, min(up_s, now) - down_s)
            for each in replicas
            for down_s, up_s in each.down
        )
