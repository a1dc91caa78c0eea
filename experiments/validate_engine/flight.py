"""A scenario's workload on our own engine: the same policies, the same requests, everything recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch

from experiments.calibrate_engine.served import TORCH_DTYPES, kv_dtype_of, quantization_of
from experiments.outputs import config_digest
from experiments.validate.environment import environment
from experiments.validate.recorded_settings import deciding
from experiments.validate_engine.drive import Drive, PromptTokens
from experiments.validate_engine.recording import Recorder, Recording
from hwmodels.model_spec import ModelSpec
from realengine.architecture import Architecture
from realengine.backend import choose_device
from realengine.build import Memory, Model, assemble, build_executor
from realengine.clock import Clock, ThreadTimeClock, WallClock
from realengine.executor import Executor
from realengine.graphs import Drawn
from realengine.parallel import Group
from realengine.settings import EngineSettings
from realengine.work import Work
from sim.scenario import Scenario
from sim.workload.base import Arrival, Source

WARM_UP_REQUESTS = 8


@dataclass(slots=True)
class Hangar:
    """Executors that were built, to be used again: weights and graphs take long on a GPU.

    Only the last is kept: a second model may not fit beside the first.
    """

    device: torch.device
    _key: tuple[Any, ...] = ()
    _built: tuple[Executor, Memory] | None = None

    @classmethod
    def of(cls, device: str) -> Hangar:
        """device: cpu or cuda. Raises ValueError or RuntimeError where there is no such device."""
        chosen = choose_device(device)
        if chosen.type == "cpu":
            torch.set_num_threads(1)  # thread time sees no other
        return cls(chosen)

    def executor(self, model: Model, settings: EngineSettings) -> tuple[Executor, Memory]:
        """Raises ValueError for what the engine cannot serve."""
        key = (
            model.architecture,
            settings.dtype,
            settings.quantization,
            settings.kv_cache_dtype,
            settings.max_num_seqs,
            settings.max_model_len,
            settings.num_kv_blocks,
            settings.gpu_memory_utilization,
            settings.swap_space_gib,
            settings.use_graphs,
            settings.caching.block_size,
            settings.num_kv_blocks is None and settings.max_num_batched_tokens,
        )
        if self._built is None or key != self._key:
            self._built = None  # its memory is wanted
            self._built = build_executor(model, settings, self.device, Group())
            self._key = key
        return self._built


class Stopwatch:
    """What a synchronous executor took, summed up."""

    def __init__(self, execute: Callable[[Work], Drawn | None], clock: Clock) -> None:
        self._execute = execute
        self._clock = clock
        self._spent_s = 0.0

    def execute(self, work: Work) -> Drawn | None:
        """Run it, and count the time."""
        begin_s = self._clock.now()
        drawn = self._execute(work)
        self._spent_s += self._clock.now() - begin_s
        return drawn

    def take(self) -> float:
        """Seconds since the last time."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s


def settings_of(scenario: Scenario, device: torch.device) -> EngineSettings:
    """The engine that the scenario describes. Raises ValueError, with the setting, for one that it is not."""
    if scenario.replicas > 1:
        raise ValueError(f"replicas={scenario.replicas}: one engine is flown; set it to 1")
    if scenario.layout.num_devices > 1:
        raise ValueError(f"{scenario.layout.num_devices} devices: one is flown; set the parallel sizes to 1")
    if scenario.lora is not None:
        raise ValueError("lora: not flown; set it to null")
    model, profile = scenario.model, scenario.engine
    return EngineSettings(
        device=device.type,
        dtype=TORCH_DTYPES[model.dtype],
        quantization=quantization_of(model),
        kv_cache_dtype="auto"
        if kv_dtype_of(model) == getattr(torch, TORCH_DTYPES[model.dtype])
        else model.kv_dtype,
        max_model_len=scenario.max_model_len,
        max_num_seqs=profile.max_num_seqs,
        num_kv_blocks=profile.num_kv_blocks,
        gpu_memory_utilization=profile.gpu_memory_utilization,
        swap_space_gib=profile.swap_space_gib,
        use_graphs=profile.cuda_graphs.enabled and device.type == "cuda",
        overlap=profile.host.overlapped,
        batching=deepcopy(scenario.batching),
        scheduling=deepcopy(scenario.scheduling),
        caching=scenario.caching,
        predictor=deepcopy(scenario.prediction),
        seed=scenario.seed,
    )


def _kv_cache_dtype(model: ModelSpec) -> str:
    kv_dtype_of(model)  # raises ValueError for what the engine has not
    return "auto" if model.kv_dtype == model.dtype else model.kv_dtype


def with_memory_of(scenario: Scenario, architecture: Architecture, hangar: Hangar) -> Scenario:
    """The scenario with as many KV blocks as the engine has. Raises ValueError where a token's KV differs."""
    _, memory = hangar.executor(Model.of(architecture), settings_of(scenario, hangar.device))
    per_token = memory.block_bytes / scenario.caching.block_size
    if per_token != scenario.kv_bytes_per_token:
        raise ValueError(
            f"model.kv_cache_dtype: a token's KV has {per_token:g} bytes in the engine, "
            f"{scenario.kv_bytes_per_token:g} in the hardware model; choose another"
        )
    return replace(scenario, engine=replace(scenario.engine, num_kv_blocks=memory.num_blocks))


def fly(
    scenario: Scenario,
    architecture: Architecture,
    hangar: Hangar,
    config: Mapping[str, Any],
) -> Recording:
    """One run on the engine, from an empty cache.

    config: the resolved configuration, of which the recording keeps what an engine's behaviour hangs on.
    Raises ValueError for what the engine cannot serve.
    """
    settings = settings_of(scenario, hangar.device)
    executor, memory = hangar.executor(Model.of(architecture), settings)
    _warm_up(scenario, architecture, settings, executor, memory)
    recording, engine = _fly(scenario.source(), architecture, settings, executor, memory)
    kept = deciding(config)
    recording.engine |= {
        "device": torch.cuda.get_device_name(executor.device) if executor.device.type == "cuda" else "cpu",
        "num_kv_blocks": engine.core.pool.num_blocks,
        "block_size": engine.core.pool.block_size,
        "overlapped": bool(settings.overlap),
        "config": kept,
        "config_digest": config_digest(kept),
        "environment": environment(config),
    }
    return recording


def _warm_up(
    scenario: Scenario,
    architecture: Architecture,
    settings: EngineSettings,
    executor: Executor,
    memory: Memory,
) -> None:
    """What is done for the first time takes longer: the first requests, by an engine that nobody watches."""
    first = _First(scenario.source(), WARM_UP_REQUESTS)
    _fly(first, architecture, settings, executor, memory)


def _fly(
    source: Source,
    architecture: Architecture,
    settings: EngineSettings,
    executor: Executor,
    memory: Memory,
) -> tuple[Recording, Any]:
    is_cpu = executor.device.type == "cpu"
    clock: Clock = ThreadTimeClock() if is_cpu else WallClock()
    own = replace(
        settings,
        batching=deepcopy(settings.batching),
        scheduling=deepcopy(settings.scheduling),
        predictor=deepcopy(settings.predictor),
    )  # what policies remember is a run's own
    stopwatch = Stopwatch(executor.run, clock) if is_cpu else None
    execute = executor.run if stopwatch is None else stopwatch.execute
    engine = assemble(Model.of(architecture), own, executor, memory, execute, clock)
    recorder = Recorder(engine.core) if stopwatch is None else Recorder(engine.core, stopwatch.take)
    engine.observer = recorder
    drive = Drive(engine, source, PromptTokens(architecture.vocab_size))
    start_s = drive.run()
    return recorder.recording({"start_s": start_s}), engine


class _First:
    """The first open-loop requests of a source, all at once, so that they batch."""

    def __init__(self, source: Source, count: int) -> None:
        self._source = source
        self._count = count
        self.num_requests: int | None = None
        self.last_arrival_s: float | None = None
        self.patience_s: float | None = None
        self.notes = source.notes

    def arrivals(self) -> Any:
        for arrival in islice(self._source.arrivals(), self._count):
            yield Arrival(arrival.request._replace(arrival_s=0.0, deadline_s=None), arrival.num_output_tokens)

    def follow_up(self, request: Any, now: float, num_output_tokens: int) -> Arrival | None:
        return None
