"""The attachment of a replica that replicates its KV to another host and restores KV after a crash."""

from __future__ import annotations

from functools import partial

from simpy import Event

from policies.core.plan import StepPlan, Transfer
from policies.core.sequence import LOADING
from sim.engine.attachment import Attachment
from sim.engine.clock import Clock, Phase
from sim.engine.replica import Replica
from sim.engine.running_step import RunningStep
from sim.transfer.kv_replication import KvReplication


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
        """Copies new KV after num_iterations of a step, which a leap has not committed to the engine yet."""
        if event is not self._timer:
            return
        num_uncommitted = num_iterations if self._step is step else 0
        self._num_replicated = self._replica.core.num_iterations + num_uncommitted
        self._kv_replication.copy(self._replica, self._computed_after(step.plan, num_uncommitted))
        if num_uncommitted:
            self._schedule_copy(step)

    def _computed_after(self, plan: StepPlan, num_iterations: int) -> dict[int, int]:
        """Returns the computed tokens of each sequence to copy after num_iterations of a running plan.

        Complete sequences, which an asynchronous engine holds for one more step, are not among them.
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
