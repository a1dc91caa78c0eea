"""Replicates KV to the host memory of other replicas, for recovery from crashes.

    replica 0 --- new KV, every few iterations ----> host of replica 1   the next replica that is up
    replica 0 crashes ... the router chooses replica 2
    replica 2 <--- KV that had arrived by then ----- host of replica 1   the rest is recomputed

All KV that the sequences of a replica have computed since the last copy is sent in one flow, which shares the
links with other flows. An incomplete flow is lost when its replica crashes. When the replica that holds a
copy goes down, all KV is sent again to the next replica that is up. When a sequence ends or is preempted, its
copy is dropped.

Simplifications: a copy does not slow down the replica's iterations (the GPU's copy engines do the work); host
memory has room for all copies; KV that sequences share in a prefix cache is sent once per sequence. Branches
are not replicated, and neither are replicas of a prefill pool, which hold a sequence only during its prefill.

`KvReplicator` is the attachment of a replica that replicates its KV to another host and restores KV after a
crash.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from simpy import Event

from policies.core.plan import StepPlan, Transfer
from policies.core.sequence import LOADING
from sim.engine.attachment import Attachment
from sim.engine.clock import Clock, Phase
from sim.engine.iteration_times import RunningStep
from sim.engine.replica import Replica
from sim.transfer.kv_transfers import GatewayForTransfers
from sim.transfer.network import Flow, Interconnect


@dataclass(slots=True, eq=False)
class _KvCopy:
    """A copy of the KV of one replica in the host memory of another, in tokens by request id."""

    host: Replica
    sent: dict[int, int] = field(default_factory=dict)
    """Tokens that have arrived or are being sent, of the sequences that hold KV."""
    arrived: dict[int, int] = field(default_factory=dict)
    """Tokens that have arrived."""
    flows: dict[Flow, None] = field(default_factory=dict)
    """Flows in progress, in the order of their start."""


@dataclass(slots=True, eq=False)
class _Restore:
    """A request that was sent to `target` and reads its KV from `host`."""

    target: Replica
    host: Replica
    num_tokens: int = 0
    num_bytes: float = 0.0
    flow: Flow | None = None


class KvReplication:
    """All copies of KV of a run; a replica sends its new KV every `every_tokens` iterations."""

    def __init__(self, every_tokens: int, gateway: GatewayForTransfers, interconnect: Interconnect) -> None:
        self.every_tokens = every_tokens
        self.replicated_bytes = self.restored_bytes = 0.0
        self.num_restored_tokens = 0
        self._gateway = gateway
        self._interconnect = interconnect
        self._copies: dict[int, _KvCopy] = {}  # by index of the replica that is copied
        self._left: dict[int, tuple[Replica, int]] = {}  # after a crash, by request id: host and tokens
        self._restores: dict[int, _Restore] = {}  # by request id

    def copy(self, replica: Replica, computed: Mapping[int, int]) -> None:
        """Sends the KV computed since the last copy.

        computed: tokens of each sequence that holds KV, by request id.
        """
        kv_copy = self._copies.get(replica.index)
        if kv_copy is None:
            if not computed:
                return  # the replica may have left the fleet in its last step
            host = self._gateway.fleet.next_serving(replica)
            if host is None:
                return
            kv_copy = self._copies[replica.index] = _KvCopy(host)
        sent = kv_copy.sent
        new = {rid: tokens for rid, tokens in computed.items() if tokens > sent.get(rid, 0)}
        num_tokens = sum(tokens - sent.get(rid, 0) for rid, tokens in new.items())
        kv_copy.sent = {rid: max(tokens, sent.get(rid, 0)) for rid, tokens in computed.items()}
        kv_copy.arrived = {rid: tokens for rid, tokens in kv_copy.arrived.items() if rid in computed}
        if not num_tokens:
            return
        host = kv_copy.host
        route = self._interconnect.route(replica.index, host.index, host=host.index)
        num_bytes = num_tokens * replica.copies.links.bytes_per_token
        flow = self._interconnect.network.send(route, num_bytes, lambda: self._on_arrived(kv_copy, flow, new))
        kv_copy.flows[flow] = None

    def num_left(self, request_id: int) -> int:
        """Returns the number of tokens of a crashed replica's request that can be read from a copy now."""
        host, num_tokens = self._left.get(request_id, (None, 0))
        return num_tokens if host is not None and self._gateway.fleet.is_reached(host) else 0

    def expect(self, request_id: int, target: Replica) -> None:
        """Registers the replica in which a request continues and that will read its KV."""
        self._restores[request_id] = _Restore(target, self._left[request_id][0])

    def fetch(self, request_id: int, num_tokens: int) -> bool:
        """Starts the transfer of num_tokens tokens of KV to a replica with slot and blocks for them.

        Returns False if the copy is in its own host's memory.
        """
        restore = self._restores[request_id]
        host, target = restore.host, restore.target
        restore.num_tokens = num_tokens
        restore.num_bytes = num_tokens * target.copies.links.bytes_per_token
        if host is target:
            return False
        route = self._interconnect.route(host.index, target.index, host=host.index)
        restore.flow = self._interconnect.network.send(
            route, restore.num_bytes, partial(self.fetched, request_id)
        )
        return True

    def fetched(self, request_id: int) -> None:
        """Completes the transfer of KV to a replica, unless the request has ended since."""
        restore = self._restores.pop(request_id, None)
        if restore is None:
            return
        self.num_restored_tokens += restore.num_tokens
        self.restored_bytes += restore.num_bytes
        del self._left[request_id]
        restore.target.loaded(request_id)

    def admitted(self, request_id: int) -> None:
        """Ends the restore of a request that already runs because all its KV was in a cache."""
        if self._restores.pop(request_id, None) is not None:
            del self._left[request_id]

    def ended(self, request_id: int) -> None:
        """Drops the copy of a request that has ended or restarts from scratch."""
        self._left.pop(request_id, None)
        self._cancel(request_id)

    def crashed(self, replica: Replica, lost: list[int]) -> None:
        """Handles the crash of a replica that has lost these requests and the copies in its host memory."""
        kv_copy = self._copies.pop(replica.index, None)
        for request_id in lost:
            self._cancel(request_id)
            num_tokens = 0 if kv_copy is None else kv_copy.arrived.get(request_id, 0)
            if kv_copy is not None and num_tokens > self._left.get(request_id, (None, 0))[1]:
                self._left[request_id] = (kv_copy.host, num_tokens)
        if kv_copy is not None:
            self._stop(kv_copy)
        self._forget_host(replica)

    def gone(self, replica: Replica) -> None:
        """Handles the removal of a replica and its host from the fleet."""
        kv_copy = self._copies.pop(replica.index, None)
        if kv_copy is not None:
            self._stop(kv_copy)
        self._forget_host(replica)

    def _forget_host(self, host: Replica) -> None:
        for index, kv_copy in list(self._copies.items()):
            if kv_copy.host is host:
                self._stop(kv_copy)
                del self._copies[index]
        for request_id, (holder, _) in list(self._left.items()):
            if holder is not host:
                continue
            del self._left[request_id]
            restore = self._restores.get(request_id)
            if restore is not None:
                self._cancel(request_id)
                restart = partial(self._gateway.restart, request_id, is_resend=False)
                restore.target.abort(request_id, restart)

    def _on_arrived(self, kv_copy: _KvCopy, flow: Flow, new: Mapping[int, int]) -> None:
        """Counts the tokens of a flow that has arrived."""
        del kv_copy.flows[flow]
        self.replicated_bytes += flow.num_bytes
        kv_copy.arrived |= {rid: tokens for rid, tokens in new.items() if rid in kv_copy.sent}

    def _stop(self, kv_copy: _KvCopy) -> None:
        """Cancels the flows of a copy."""
        for flow in kv_copy.flows:
            self.replicated_bytes += self._interconnect.network.cancel(flow)
        kv_copy.flows.clear()

    def _cancel(self, request_id: int) -> None:
        """Cancels the restore of the KV of a request, if there is one."""
        restore = self._restores.pop(request_id, None)
        if restore is not None and restore.flow is not None:
            self._interconnect.network.cancel(restore.flow)


class KvReplicator(Attachment):
    """Sends new KV after every `KvReplication.every_tokens` iterations of a replica."""

    def __init__(self, replica: Replica, kv_replication: KvReplication, clock: Clock) -> None:
        self._replica = replica
        self._kv_replication = kv_replication
        self._clock = clock
        self._step: RunningStep | None = None
        self._timer: Event | None = None  # the valid event
        self._num_replicated = 0  # iterations up to the last copy
        replica.copies.sources["mirror"] = self._fetch

    def planned(self, plan: StepPlan | None, now: float) -> None:
        self._timer = None
        for seq in () if plan is None else plan.admitted:
            self._kv_replication.admitted(seq.request_id)

    def started(self, step: RunningStep | None, now: float) -> None:
        self._step = step
        if step is not None and self._replica.pool.role != "prefill":
            self._schedule_copy(step)

    def ending(self, step: RunningStep, now: float) -> None:
        self._step = None

    def crashed(self, now: float) -> None:
        self._timer = self._step = None

    def _schedule_copy(self, step: RunningStep) -> None:
        """Schedules the next copy in a step, if one of its iterations is due."""
        every, num_before = self._kv_replication.every_tokens, self._replica.core.num_iterations
        due = (max(num_before, self._num_replicated) // every + 1) * every - num_before
        if due <= step.num_iterations:
            copy = partial(self._copy, step, due)
            phase = Phase.replicate_kv + self._replica.index
            self._timer = self._clock.at(step.ends_s[due - 1], phase, copy)

    def _copy(self, step: RunningStep, num_iterations: int, event: Event) -> None:
        """Copies new KV after num_iterations of a step that a leap has not committed to the engine yet."""
        if event is not self._timer:
            return
        num_uncommitted = num_iterations if self._step is step else 0
        self._num_replicated = self._replica.core.num_iterations + num_uncommitted
        self._kv_replication.copy(self._replica, self._computed_after(step.plan, num_uncommitted))
        if num_uncommitted:
            self._schedule_copy(step)

    def _computed_after(self, plan: StepPlan, num_iterations: int) -> dict[int, int]:
        """Returns the computed tokens of each sequence to copy after num_iterations of a running plan.

        Complete sequences, which an asynchronous engine holds for one more step, are excluded.
        """
        core = self._replica.core
        ending = core.running_set.ending
        computed = {
            request_id: seq.num_computed
            for request_id, seq in core.running.items()
            if seq.state is not LOADING and request_id not in ending and seq.request.branching is None
        }
        if num_iterations:
            for seq, num_tokens in plan.decoded_after(num_iterations):
                if seq.request_id in computed:
                    computed[seq.request_id] += num_tokens
            for chunk in plan.chunks:
                if chunk.seq.request_id in computed:
                    computed[chunk.seq.request_id] += num_iterations * chunk.num_tokens
        return computed

    def _fetch(self, transfer: Transfer) -> None:
        """Starts reading KV that was replicated before a crash, from another host or from its own."""
        assert transfer.seq is not None
        request_id = transfer.seq.request_id
        if not self._kv_replication.fetch(request_id, transfer.num_tokens):
            replica = self._replica
            done_s = replica.copies.links.begin(transfer._replace(source="host"), self._clock.now)
            replica.schedule(done_s, Phase.arrive, partial(self._kv_replication.fetched, request_id))
