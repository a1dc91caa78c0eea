"""Counts what a fleet of engines does, for /metrics: one set of metrics per engine, as the gateway sees it.

Times are those at which the gateway reads tokens. Preemptions and draft tokens are not reported by a fleet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from experiments.serve.metrics.engine import EndedRequest, EngineMetrics, EngineState
from policies.gateway.signals import Counts
from realengine.fleet.async_fleet import AsyncFleet, FleetObserver
from realengine.fleet.replica import EngineReplica, State
from realengine.fleet.request import FleetRequest
from realengine.settings import EngineSettings


@dataclass(slots=True)
class TokenTimes:
    """When a request got its first and its last token, in seconds on the clock of the fleet."""

    first_s: float
    last_s: float


class FleetMetrics:
    """An observer of a fleet that fills `of_engine`."""

    def __init__(self, fleet: AsyncFleet, settings: EngineSettings, model_name: str) -> None:
        self._states: dict[int, EngineState] = {}
        self._times: dict[int, TokenTimes] = {}  # by number of a request in progress
        self._num_computed = self._num_new = 0  # tokens of the step that is being read
        self._settings = settings
        self._model_name = model_name
        self._by_index: dict[int, EngineMetrics] = {}
        self.of_engine: list[EngineMetrics] = []
        """The metrics of each engine, in the order in which they began to serve."""
        for replica in fleet.fleet.of(State.serving):
            self._of(replica)

    def _of(self, replica: EngineReplica) -> EngineMetrics:
        """Returns the metrics of an engine, also of one that has joined the fleet."""
        if replica.index not in self._by_index:
            assert replica.sizes is not None
            self._states[replica.index] = _state(replica, Counts())
            metrics = self._by_index[replica.index] = EngineMetrics(
                replica.index,
                partial(self._states.__getitem__, replica.index),
                model_name=self._model_name,
                max_model_len=replica.sizes.max_model_len,
                cache_config={
                    "block_size": str(replica.sizes.block_size),
                    "num_gpu_blocks": str(replica.sizes.num_blocks),
                    "cache_dtype": self._settings.kv_cache_dtype,
                    "gpu_memory_utilization": str(self._settings.gpu_memory_utilization),
                },
            )
            self.of_engine.append(metrics)
        return self._by_index[replica.index]

    def emitted(self, own: FleetRequest, replica: EngineReplica, num_tokens: int, now: float) -> None:
        metrics, times = self._of(replica), self._times.get(own.number)
        if times is None:
            num_prompt, num_cached = len(own.tokens), own.answer.num_cached_tokens
            self._times[own.number] = TokenTimes(now, now)
            metrics.looked_up(num_prompt, num_cached)
            metrics.prefilled(num_prompt, num_cached)
            self._num_computed += num_prompt - num_cached
            metrics.first_token(now - own.request.arrival_s)
        else:
            metrics.token_gaps(now - times.last_s, 1)
            times.last_s = now
        self._num_new += num_tokens

    def ended(self, own: FleetRequest, replica: EngineReplica, now: float) -> None:
        request, output = own.request, own.outputs[0]
        times = self._times.pop(own.number, TokenTimes(now, now))
        assert replica.sizes is not None
        reason = output.finish_reason
        self._of(replica).ended(
            EndedRequest(
                finished_reason="abort" if reason in (None, "aborted", "error") else reason,
                prompt_tokens=len(own.tokens),
                generation_tokens=len(output.tokens),
                max_tokens=request.max_tokens or replica.sizes.max_model_len - len(own.tokens),
                num_preemptions=0,
                arrival_s=request.arrival_s,
                queued_s=request.arrival_s,
                scheduled_s=request.arrival_s,
                first_token_s=times.first_s,
                last_token_s=times.last_s,
                finished_s=now,
            )
        )

    def stepped(self, replica: EngineReplica) -> None:
        self._of(replica).iterated(self._num_computed, self._num_new)
        self._num_computed = self._num_new = 0

    def began(self, replica: EngineReplica, counts: Counts) -> None:
        self._states[replica.index] = _state(replica, counts)


def _state(replica: EngineReplica, counts: Counts) -> EngineState:
    assert replica.sizes is not None
    return EngineState(
        num_running=counts.num_running,
        num_waiting=counts.num_waiting,
        kv_cache_usage=counts.num_blocks_used / replica.sizes.num_blocks,
        waiting_adapters=(),
        running_adapters=(),
        num_preemptions=0,
    )


class FleetObservers:
    """Several observers in the place of one."""

    def __init__(self, observers: Sequence[FleetObserver]) -> None:
        self._observers = tuple(observers)

    def emitted(self, own: FleetRequest, replica: EngineReplica, num_tokens: int, now: float) -> None:
        for each in self._observers:
            each.emitted(own, replica, num_tokens, now)

    def ended(self, own: FleetRequest, replica: EngineReplica, now: float) -> None:
        for each in self._observers:
            each.ended(own, replica, now)

    def stepped(self, replica: EngineReplica) -> None:
        for each in self._observers:
            each.stepped(replica)

    def began(self, replica: EngineReplica, counts: Counts) -> None:
        for each in self._observers:
            each.began(replica, counts)
