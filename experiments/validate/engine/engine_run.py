"""Runs a scenario's workload on our own engine with the same policies and requests, and records it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from experiments.calibrate.engine.pace import Reference
from experiments.calibrate.engine.scenario_settings import alone_settings_of
from experiments.calibrate.engine.steps import padding_work
from experiments.validate.engine.drive import Drive, PromptTokens
from experiments.validate.engine.executor_cache import ExecutorCache, padding_of
from experiments.validate.engine.paced import PacedClock
from experiments.validate.engine.recording import Recorder, Recording
from experiments.validate.fidelity.environment import environment
from experiments.validate.fidelity.recorded_settings import deciding
from realengine.build import assemble
from realengine.clock import ThreadTimeClock, WallClock
from realengine.engine import Engine
from realengine.model.architecture import Architecture
from realengine.runner.executor import Executor
from realengine.runner.graphs import Drawn
from realengine.runner.memory import Memory
from realengine.runner.work import Work
from realengine.serving.model import Model
from realengine.settings import SEVERAL, EngineSettings
from sim.report.files import config_digest
from sim.setup.scenario import Scenario
from sim.workload.base import Arrival, Source

WARM_UP_REQUESTS = 8


class Stopwatch:
    """Sums up the time that a synchronous executor takes."""

    def __init__(self, execute: Callable[[Work], Drawn | None], clock: ThreadTimeClock | PacedClock) -> None:
        self._execute = execute
        self._clock = clock
        self._spent_s = 0.0

    def execute(self, work: Work) -> Drawn | None:
        """Runs the work and adds its time."""
        if isinstance(self._clock, PacedClock):
            self._clock.look()
        begin_s = self._clock.now()
        drawn = self._execute(work)
        self._spent_s += self._clock.now() - begin_s
        return drawn

    def take(self) -> float:
        """Returns the seconds spent since the last call."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s


def settings_of(
    scenario: Scenario, device: torch.device, config: Mapping[str, Any] | None = None
) -> EngineSettings:
    """Returns the engine settings of a scenario. Raises ValueError, with the key, if one is unsupported.

    config: its resolved configuration; only a draft model needs it.
    """
    settings = alone_settings_of(scenario, device, config)
    for name in SEVERAL:
        if (size := getattr(settings, name)) > 1:
            raise ValueError(f"{name}={size}: only one device is measured and used; set it to 1")
    return settings


def with_memory_of(
    scenario: Scenario,
    architecture: Architecture,
    executors: ExecutorCache,
    config: Mapping[str, Any] | None = None,
) -> Scenario:
    """Returns the scenario with the engine's number of KV blocks. Raises ValueError if KV sizes differ."""
    _, memory = executors.executor(Model.of(architecture), settings_of(scenario, executors.device, config))
    per_token = memory.block_bytes / scenario.caching.block_size
    if per_token != scenario.kv_bytes_per_token:
        raise ValueError(
            f"model.kv_cache_dtype: a token's KV has {per_token:g} bytes in the engine, "
            f"{scenario.kv_bytes_per_token:g} in the hardware model; choose another"
        )
    return replace(scenario, engine=replace(scenario.engine, num_kv_blocks=memory.num_blocks))


def run_on_engine(
    scenario: Scenario,
    architecture: Architecture,
    executors: ExecutorCache,
    config: Mapping[str, Any],
) -> Recording:
    """Runs the workload once on the engine, from an empty cache, and returns the recording.

    config: the resolved configuration; the recording keeps the part that decides the engine's behaviour.
    Raises ValueError for settings that the engine does not support.
    """
    settings = settings_of(scenario, executors.device, config)
    executor, memory = executors.executor(Model.of(architecture), settings)
    first = _First(
        scenario.source(), WARM_UP_REQUESTS
    )  # the first requests take longer: they warm the engine up
    _run_once(first, architecture, settings, executor, memory, executors.reference)
    source = scenario.source()
    recording, engine = _run_once(source, architecture, settings, executor, memory, executors.reference)
    kept = deciding(config)
    recording.engine |= {
        "device": torch.cuda.get_device_name(executor.device) if executor.device.type == "cuda" else "cpu",
        "num_kv_blocks": engine.core.block_pool.num_blocks,
        "block_size": engine.core.block_pool.block_size,
        "overlapped": bool(settings.overlap),
        "config": kept,
        "config_digest": config_digest(kept),
        "environment": environment(config),
    }
    return recording


def _run_once(
    source: Source,
    architecture: Architecture,
    settings: EngineSettings,
    executor: Executor,
    memory: Memory,
    reference: Reference | None,
) -> tuple[Recording, Engine]:
    about: dict[str, Any] = {}
    if executor.device.type == "cpu":
        clock = _cpu_clock(executor, settings, reference)
        stopwatch = Stopwatch(executor.run, clock)
        engine = assemble(Model.of(architecture), settings, executor, memory, stopwatch.execute, clock)
        recorder = Recorder(engine.core, stopwatch.take)
    else:
        clock = None
        engine = assemble(Model.of(architecture), settings, executor, memory, executor.run, WallClock())
        recorder = Recorder(engine.core)
    engine.observer = recorder
    about["start_s"] = Drive(engine, source, PromptTokens(architecture.vocab_size)).run()
    if isinstance(clock, PacedClock):
        about["pace"] = clock.end()._asdict()
        if reference is not None and reference.pace is not None:
            about["calibration_pace"] = reference.pace._asdict()
    return recorder.recording(about), engine


def _cpu_clock(
    executor: Executor, settings: EngineSettings, reference: Reference | None
) -> ThreadTimeClock | PacedClock:
    if reference is None:
        return ThreadTimeClock()
    padding = padding_of(settings)
    return PacedClock(lambda: executor.run(padding_work(padding)), reference.seconds)


class _First:
    """Warm-up traffic: the first requests of a source, all arriving at time 0 so that they form batches."""

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

    def follow_ups(self, request: Any, now: float, num_output_tokens: int) -> Sequence[Arrival]:
        return ()
