"""The metrics of a simulated fleet: those of its replicas, and those of the server's clock.

All times are simulated seconds, as in the tables of the run: with time_scale=10 a rate per wall second is ten
times that per simulated second.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from experiments.serve.backend import Generation
from experiments.serve.metrics.engine import EndedRequest, EngineMetrics, EngineState
from experiments.serve.metrics.exposition import ServerGauge, ServerHistogram, ServingMetrics
from experiments.serve.simulated.driver import Driver
from experiments.serve.simulated.fleet import SimulatedFleet
from experiments.serve.simulated.replica_metrics import ReplicaMetrics
from policies.gateway.gateway import UNSERVABLE
from policies.speculation import num_places
from sim.cluster.gateway import GatewayAttachment, RequestAttempt
from sim.cluster.live import Ended
from sim.engine.replica import Replica
from sim.records.requests import RequestLog, Status
from sim.setup.pool import PoolSettings

TOKEN_DELAY = "windtunnel:serve_token_delay_seconds"
_TOKEN_DELAY_HELP = (
    "Wall seconds from the simulated time of tokens of a stream until they are written to its connection; "
    "a client that does not read delays its own."
)
TOKEN_WORK = "windtunnel:serve_token_work_seconds"
_TOKEN_WORK_HELP = (
    "CPU seconds of the server from the event that has brought tokens of a stream until they are written, "
    "also for other streams: the part of the delay that is the server's own."
)


class FleetMetrics(GatewayAttachment):
    """Attaches metrics to a fleet, and keeps those of each replica."""

    def __init__(self, fleet: SimulatedFleet, names: Sequence[str] | None = None) -> None:
        """Attaches to a fleet. names: those of its model for clients, if they are not its own."""
        self._name = names[0] if names else None
        self.engines: dict[int, EngineMetrics] = {}
        """By index of the replica."""
        self._refused: defaultdict[int, Counter[str]] = defaultdict(Counter)  # pinned requests, by replica
        self._fleet = fleet
        self._requests: RequestLog = fleet.simulation.requests
        self._clock = _clock_of(fleet.driver)
        fleet.attach(self._attach_to)
        fleet.on_close.append(self._closed)
        fleet.simulation.gateway.attach(self)
        self.serving = ServingMetrics(
            self.engines.values,
            rejections=self._rejections,
            gauges=_gauges_of(fleet.driver),
            histograms=[
                ServerHistogram(TOKEN_DELAY, _TOKEN_DELAY_HELP, fleet.token_delays),
                ServerHistogram(TOKEN_WORK, _TOKEN_WORK_HELP, fleet.token_work),
            ],
            clock=self._clock,
        )
        """The metrics of the whole fleet."""

    def of_replica(self, index: int) -> ServingMetrics:
        """Returns the metrics of one replica, with the refusals of requests that were pinned to it."""
        return ServingMetrics(
            lambda: [self.engines[index]],
            rejections=lambda: self._refused[index],
            gauges=_gauges_of(self._fleet.driver),
            clock=self._clock,
        )

    def _rejections(self) -> Mapping[str, int]:
        return self._requests.failed_attempts

    def _attach_to(self, replica: Replica) -> None:
        settings = self._fleet.scenario.pools_by_name[replica.pool.name]
        metrics = ReplicaMetrics(replica, partial(self._engine, replica, settings))
        self.engines[replica.index] = metrics.engine
        replica.attach(metrics)

    def _engine(
        self, replica: Replica, settings: PoolSettings, state: Callable[[], EngineState]
    ) -> EngineMetrics:
        proposer, adapters = settings.speculation, settings.adapters
        num_served = len(self._fleet.scenario.served_adapters)
        return EngineMetrics(
            replica.index,
            state,
            model_name=self._name or replica.pool.serves,
            max_model_len=settings.max_model_len,
            cache_config=_cache_config(replica, settings),
            num_draft_places=0 if proposer is None else num_places(proposer),
            max_adapters=None if adapters is None else adapters.slots[0] or num_served,
        )

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


def _cache_config(replica: Replica, settings: PoolSettings) -> dict[str, str]:
    """Returns the settings of a replica's KV cache, with the names and spellings of vLLM's."""
    pool = replica.core.block_pool
    return {
        "block_size": str(pool.block_size),
        "num_gpu_blocks": str(pool.num_blocks),
        "enable_prefix_caching": str(pool.finds_kv),
        "cache_dtype": settings.model.kv_cache_dtype,
        "gpu_memory_utilization": str(settings.memory_share),
    }


def _clock_of(driver: Driver) -> str:
    if driver.time_scale == 1:
        return ""
    return f"[simulated seconds: {driver.time_scale:g} of them pass in a second]"


def _gauges_of(driver: Driver) -> list[ServerGauge]:
    return [
        ServerGauge(
            "windtunnel:serve_late_seconds",
            "Wall seconds by which the last event of the simulation was late.",
            lambda: driver.late_s,
        ),
        ServerGauge(
            "windtunnel:serve_max_late_seconds",
            "Wall seconds by which the latest event since the start was late.",
            lambda: driver.max_late_s,
        ),
        ServerGauge(
            "windtunnel:serve_time_scale",
            "Simulated seconds per wall second.",
            lambda: driver.time_scale,
        ),
    ]
