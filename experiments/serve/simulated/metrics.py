"""Fills the metrics of a simulated fleet: those of its replicas, and those of the server's clock.

All times are simulated seconds, as in the tables of the run: with time_scale=10 a rate per wall second is ten
times that per simulated second.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence as SequenceOf
from math import isnan
from typing import Any

import numpy as np

from experiments.serve.backend import Generation
from experiments.serve.metrics.engine import (
    EndedRequest,
    EngineMetrics,
    EngineState,
    adapters_of,
    cache_config_of,
)
from experiments.serve.metrics.exporter import ServerState, ServingMetrics
from experiments.serve.simulated.fleet import SimulatedFleet
from hwmodels.iterations import AdapterBatch, DraftWork, IterationShape
from policies.caching.pool import BlockPool
from policies.core.plan import StepPlan
from policies.core.sequence import Sequence
from policies.gateway.gateway import UNSERVABLE
from policies.speculation.engine.drafts import DraftPlan
from sim.cluster.gateway import GatewayAttachment, RequestAttempt
from sim.cluster.live import Ended
from sim.engine.attachment import Attachment
from sim.engine.iteration_times import RunningStep, shape_of
from sim.engine.replica import Replica
from sim.records.requests import RequestLog, Status
from sim.setup.pool import PoolSettings
from sim.speculation.log import first_shape

MAX_SHAPES = 4096
"""Iterations whose work is priced at once, if no scrape comes before."""


class FleetMetrics(GatewayAttachment):
    """Attaches metrics to a fleet, and keeps those of each replica."""

    def __init__(self, fleet: SimulatedFleet, names: SequenceOf[str] | None = None) -> None:
        """Attaches to a fleet. names: those of its model for clients, if they are not its own."""
        self._name = names[0] if names else None
        self.engines: dict[int, EngineMetrics] = {}
        """By index of the replica."""
        self._refused: defaultdict[int, Counter[str]] = defaultdict(Counter)  # pinned requests, by replica
        self._fleet = fleet
        self._requests: RequestLog = fleet.simulation.requests
        fleet.attach(self._attach_to)
        fleet.on_close.append(self._closed)
        fleet.simulation.gateway.attach(self)
        self.serving = ServingMetrics(
            self.engines.values,
            lambda: ServerState(
                self._requests.failed_attempts, fleet.driver, fleet.token_delays, fleet.token_work
            ),
        )
        """The metrics of the whole fleet."""

    def of_replica(self, index: int) -> ServingMetrics:
        """Returns the metrics of one replica, with the refusals of requests that were pinned to it."""
        return ServingMetrics(
            lambda: [self.engines[index]], lambda: ServerState(self._refused[index], self._fleet.driver)
        )

    def _attach_to(self, replica: Replica) -> None:
        settings = self._fleet.scenario.pools_by_name[replica.pool.name]
        adapters, num_served = settings.adapters, len(self._fleet.scenario.served_adapters)
        most = None if adapters is None else adapters.slots[0] or num_served
        metrics = ReplicaMetrics(replica, settings, self._name or replica.pool.serves, most)
        self.engines[replica.index] = metrics.engine
        replica.attach(metrics)

    # Ends of requests.

    def left(self, attempt: RequestAttempt, now: float) -> None:
        """Counts a request that is complete or was aborted; the log counts those that were refused."""
        requests, request = self._requests, attempt.arrival.request
        request_id = request.request_id
        engine = self.engines.get(requests.replica[request_id])
        status = requests.status[request_id]
        if engine is None or status == Status.unfinished:
            return
        log, prefilled_by = requests, requests.prefill_replica[request_id]
        end = Ended(Status(status), log.reason.get(request_id, ""), log.output_tokens[request_id])
        first = self._fleet.simulation.replicas[engine.index if prefilled_by < 0 else prefilled_by]
        arrival_s, first_token_s = log.arrival_s[request_id], log.first_token_s[request_id]
        if status == Status.finished and first.pool.role == "prefill":
            engine.first_token(first_token_s - arrival_s)
        prompt_tokens = request.prompt.num_tokens
        engine.ended(
            EndedRequest(
                finished_reason=self._fleet.finish_reason(request_id, end),
                prompt_tokens=prompt_tokens,
                generation_tokens=end.num_output_tokens,
                max_tokens=request.max_tokens or first.core.max_model_len - prompt_tokens,
                num_preemptions=log.preemptions[request_id],
                arrival_s=arrival_s,
                queued_s=arrival_s + log.gateway_s[request_id] + first.pool.idle_frontend_s(prompt_tokens),
                scheduled_s=log.scheduled_s[request_id],
                first_token_s=first_token_s,
                last_token_s=log.last_token_s[request_id],
                finished_s=log.finished_s[request_id],
            )
        )

    def _closed(self, request_id: int, generation: Generation) -> None:
        """Counts the parameter n of a prompt at the end of its first output, and a pinned request refused."""
        requests = self._requests
        if request_id >= len(requests.replica):  # its client has gone before it arrived
            return
        engine = self.engines.get(requests.replica[request_id])
        if engine is not None and generation.output_index == 0:
            engine.parameters(generation.num_outputs)
        if generation.replica is not None and requests.status[request_id] == Status.rejected:
            reason = requests.reason[request_id]
            known = reason if reason in requests.failed_attempts else UNSERVABLE
            self._refused[generation.replica][known] += 1


class ReplicaMetrics(Attachment):
    """Fills the metrics of one replica. They count once per iteration, not per token.

    The requests of a server have no branches (n outputs are n requests), and every step of a live simulation
    is one iteration. model_name: for clients. max_adapters: LoRA adapters in a batch; None: none are served.
    """

    def __init__(
        self, replica: Replica, settings: PoolSettings, model_name: str, max_adapters: int | None
    ) -> None:
        self.engine = EngineMetrics(
            replica.index,
            self.state,
            model_name=model_name,
            max_model_len=settings.max_model_len,
            cache_config=cache_config_of(
                replica.core.block_pool, settings.model.kv_cache_dtype, settings.memory_share
            ),
            proposer=settings.speculation,
        )
        self._max_adapters = max_adapters
        self._replica = replica
        self._requests = replica.recorder.requests
        self._core = replica.core
        self._num_preemptions_before = 0  # those of engines that were lost in crashes
        self._not_looked_up: set[int] = set()  # ids of the requests that were never admitted here
        self._shapes: list[IterationShape] = []
        self._flops = self._read_bytes = 0.0

    def state(self) -> EngineState:
        """Returns the state of the replica now."""
        self._price()
        core, pool = self._core, self._core.block_pool
        waiting, running = [*core.waiting], [*core.running.values()]
        return EngineState(
            num_running=len(running) - len(core.loading),
            num_waiting=len(waiting),
            num_deferred=len(core.loading),
            kv_cache_usage=pool.num_used / pool.num_blocks,
            max_adapters=self._max_adapters,
            waiting_adapters=adapters_of([*waiting, *core.loading.values()]),
            running_adapters=adapters_of(seq for seq in running if seq.request_id not in core.loading),
            num_preemptions=self._num_preemptions_before + core.num_preemptions,
            flops=self._flops,
            read_bytes=self._read_bytes,
        )

    # Events of the replica.

    def entered(self, seq: Sequence) -> None:
        self._not_looked_up.add(seq.request_id)

    def left(self, seq: Sequence) -> None:
        self._not_looked_up.discard(seq.request_id)

    def crashed(self, now: float) -> None:
        self._num_preemptions_before += self._core.num_preemptions
        self._core = self._replica.core
        self._not_looked_up.clear()

    def planned(self, plan: StepPlan | None, now: float) -> None:
        if self._not_looked_up:
            # Without a plan there may be sequences that only wait for a load; a later plan lists them.
            for seq in self._core.loading.values() if plan is None else plan.admitted:
                if seq.request_id in self._not_looked_up:
                    self._look_up(seq)

    def _look_up(self, seq: Sequence) -> None:
        """Counts what the first admission of a sequence has found."""
        self._not_looked_up.remove(seq.request_id)
        num_tokens, num_loaded = seq.num_prompt_tokens, seq.num_loading
        num_hits = seq.num_found - num_loaded
        self.engine.looked_up(num_tokens, num_hits)
        if num_loaded or type(self._core.block_pool).num_loadable is not BlockPool.num_loadable:
            self.engine.looked_up_elsewhere(num_tokens - num_hits, num_loaded)

    def ending(self, step: RunningStep, now: float) -> None:
        plan, core, engine = step.plan, self._core, self.engine
        assert step.num_iterations == 1
        num_decodes = plan.num_decodes
        if core.running_set.ending:
            num_decodes -= core.running_set.num_surplus(plan)
        if num_decodes:
            self._count_gaps(plan, num_decodes, now)
        num_new, num_computed = num_decodes, 0
        for seq, _, _, completes in plan.chunks:
            if completes:
                num_new += 1
                num_computed += self._prefilled(seq, now)
        if isinstance(plan.drafts, DraftPlan):
            num_new += self._count_drafts(plan.drafts)
            shape = first_shape(plan, plan.drafts)
        else:
            shape = step.shape or shape_of(plan, 0)
        engine.iterated(num_computed, num_new)
        self._shapes.append(shape)
        if len(self._shapes) >= MAX_SHAPES:
            self._price()

    def _count_gaps(self, plan: StepPlan, num_decodes: int, now: float) -> None:
        """Counts the gaps of the decoding sequences: nearly all have got their latest token together."""
        tokens, engine = self._replica.recorder.tokens, self.engine
        num_together = num_decodes
        if tokens.apart:
            still = {*plan.idle, *self._core.paused.values()}
            for seq, since_s in tokens.apart.items():
                if seq not in still:
                    num_together -= 1
                    engine.token_gaps(now - since_s, 1)
        if num_together:
            engine.token_gaps(now - tokens.last_decode_s, num_together)

    def _prefilled(self, seq: Sequence, now: float) -> int:
        """Counts a complete prefill; returns the tokens of the prompt that were computed for it.

        The token of a prefill replica reaches the client later, so `EndedRequests` counts its time.
        """
        requests, request_id, engine = self._requests, seq.request_id, self.engine
        is_final = self._replica.pool.role != "prefill"
        if not isnan(requests.first_token_s[request_id]):  # recomputed after a preemption or a crash
            if is_final:
                engine.token_gaps(now - requests.last_token_s[request_id], 1)
            return 0
        num_tokens, num_cached = seq.num_prompt_tokens, requests.cached_tokens[request_id]
        engine.prefilled(num_tokens, num_cached)
        if is_final:
            engine.first_token(now - requests.arrival_s[request_id])
        return num_tokens - num_cached

    def _count_drafts(self, drafts: DraftPlan) -> int:
        """Counts the passes of an iteration; returns the accepted draft tokens that become output."""
        if not drafts.seqs:
            return 0
        counts, ended = drafts.num_drafts > 0, self._core.running_set.ending
        assert drafts.accepted is not None
        assert self.engine.drafts is not None
        if ended:
            counts &= np.array([seq.request_id not in ended for seq in drafts.seqs], bool)
        accepted = np.where(counts, drafts.accepted[0], 0)
        surplus = np.where(counts, drafts.num_computed + accepted + 1 - drafts.end, 0)
        num_by_count = np.bincount(accepted, minlength=1)
        by_place = np.cumsum(num_by_count[:0:-1])[::-1]  # passes that accepted at least 1, 2, ...
        self.engine.drafts.add(
            int(np.count_nonzero(counts)), int(np.dot(drafts.num_drafts, counts)), by_place.tolist()
        )
        return int(accepted.sum() - np.maximum(surplus, 0).sum())

    def _price(self) -> None:
        """Adds up the work of the iterations since the last call."""
        shapes, self._shapes = self._shapes, []
        pool = self._replica.pool
        model, num_devices = pool.model, pool.num_devices
        groups: dict[tuple[bool, bool], list[IterationShape]] = {}
        for shape in shapes:
            groups.setdefault((shape.adapters is None, shape.drafts is None), []).append(shape)
        for alike in groups.values():
            together = _together(alike)
            self._flops += float(np.sum(model.flops(together))) / num_devices
            self._read_bytes += float(np.sum(model.bytes_moved(together))) / num_devices


def _together(shapes: list[IterationShape]) -> IterationShape:
    """Returns the shapes of many iterations as one with arrays; all or none have adapters, and drafts."""
    columns: list[Any] = [
        np.array(column) for column in zip(*(shape.counts for shape in shapes), strict=True)
    ]
    adapters = drafts = None
    if shapes[0].adapters is not None:
        adapters = AdapterBatch(*_columns([shape.adapters for shape in shapes]))
    if shapes[0].drafts is not None:
        drafts = DraftWork(*_columns([shape.drafts for shape in shapes]))
    return IterationShape(*columns)._replace(adapters=adapters, drafts=drafts)


def _columns(rows: list[Any]) -> list[Any]:
    return [np.array(column) for column in zip(*rows, strict=True)]
