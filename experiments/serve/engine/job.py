"""One session of a server with the real engine: loads it, and says what it has done.

The settings of its engine come from the scenario and from `serve.engine`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

from rich.console import Console

from experiments.app.run_folder import SERVER_KEYS
from experiments.calibrate.engine.scenario_settings import alone_settings_of
from experiments.serve.driver import Controls, Outcome, Served
from experiments.serve.engine.backend import EngineBackend, Engines
from experiments.serve.engine.engine_metrics import EngineMetricsFeed
from experiments.serve.engine.fleet_metrics import FleetMetrics, FleetObservers
from experiments.serve.engine.fleet_recorder import FleetRecorder
from experiments.serve.engine.model_to_serve import ModelToServe, model_to_serve
from experiments.serve.engine.recorder import ServingRecorder
from experiments.serve.engine.result import Recorder, result_of
from experiments.serve.engine.settings import Device, RealEngine
from experiments.serve.http.control import SleepMode
from experiments.serve.kv_events.settings import NOTHING_TO_REPORT
from experiments.serve.layers import WithoutRemoteKv
from experiments.serve.metrics.exporter import ServerState, ServingMetrics
from experiments.serve.server import Stop
from experiments.serve.settings import Address, ServerSetup, ServeSettings
from policies.adapters.fixed_slots import FixedSlots
from policies.admission import AdmitAll
from policies.scaling.reactive import SloAttainment
from policies.scheduling.fcfs import Fcfs
from policies.user_code import name_of
from realengine.fleet.async_fleet import AsyncFleet, GatewaySettings
from realengine.model.backend import choose_device
from realengine.observer import Observers
from realengine.runner.rank import max_model_len_of
from realengine.serving.async_llm import AsyncLLM
from realengine.settings import EngineSettings
from realengine.speculation.settings import MAY_NEED_MODEL
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_scenario
from sim.setup.scenario import Scenario


def engine_settings(
    scenario: Scenario, chosen: RealEngine, device: str, config: Mapping[str, Any]
) -> EngineSettings:
    """Returns the settings of the engine.

    config: the scenario's resolved configuration. Raises ValueError, with the key, for settings that only the
    simulator has, and RuntimeError for a device that does not exist.
    """
    adapters = scenario.adapters
    if adapters is not None and not isinstance(adapters, FixedSlots):
        raise ValueError(f"adapters={name_of(adapters)}: the engine has adapters=fixed_slots only")
    if adapters is not None and not chosen.lora_modules:
        raise ValueError(
            f"adapters={name_of(adapters)}: there is no adapter to serve; set serve.engine.lora_modules, "
            "such as {sql: /adapters/sql}"
        )
    if chosen.speculative_config is not None and scenario.speculation is not None:
        raise ValueError(
            f"speculation={scenario.speculation.method}: serve.engine.speculative_config already says how "
            "the engine speculates; set speculation=none"
        )
    if isinstance(scenario.speculation, MAY_NEED_MODEL):
        method = scenario.speculation.method
        raise ValueError(
            f"speculation={method}: needs the weights of a draft; set serve.engine.speculative_config="
            f"{{method: {method}, model: DRAFT, num_speculative_tokens: 4}} instead"
        )
    alone = replace(scenario, adapters=None, replicas=1, admission=AdmitAll(), scaling=None)
    settings = alone_settings_of(alone, choose_device(device), config)
    own: dict[str, Any] = {
        "lora_adapters": dict(chosen.lora_modules or {}),
        "adapters": adapters,
        "max_iterations": chosen.max_iterations,
        "attention_backend": chosen.attention_backend,
        "enable_sleep_mode": chosen.enable_sleep_mode,
        "overlap": settings.overlap and device == "cuda",  # on a CPU there is no device beside the host
    }
    if chosen.cudagraph_mode is not None:
        own["cudagraph_mode"] = chosen.cudagraph_mode
    if chosen.speculative_config is not None:
        own["speculative_config"] = dict(chosen.speculative_config)
    return replace(settings, **own)


def gateway_settings(scenario: Scenario, max_waiting: int | None, *, sleeps: bool) -> GatewaySettings | None:
    """Returns the settings of the gateway of a fleet; None: one engine serves, without a gateway.

    sleeps: whether engines that the scaling policy does not need sleep; otherwise their processes end.

    Raises ValueError, with the key, for settings that only the simulator has.
    """
    scaling = scenario.scaling
    if scenario.replicas == 1 and isinstance(scenario.admission, AdmitAll) and scaling is None:
        return None
    if isinstance(scaling, SloAttainment):
        raise ValueError("scaling=slo_attainment: a fleet of engines measures no SLO; use another policy")
    if scenario.recovery.every_tokens is not None:
        raise ValueError("recovery=kv: engines copy no KV to each other; use recovery=tokens or scratch")
    run = scenario.for_a_run()
    settings = GatewaySettings(
        routing=run.routing,
        admission=run.admission,
        prediction=run.prediction,
        max_resends=run.max_resends,
        keeps_tokens=run.recovery.keeps_tokens,
        signal_age_s=run.signal_age_s,
        scaling=scaling,
        sleep_level=1 if sleeps else None,
        max_waiting=max_waiting,
    )
    settings.check(scenario.replicas)
    return settings


SIMULATED_ONLY = {
    "text": "random",
    "dataset": None,
    "output_length": "workload",
    "cold_start": False,
    "tool_call_share": 0.5,
    "image_tokens": 576,
    "expose": "fleet",
    "kv_lease_duration_s": 30.0,
}
"""Settings of `serve` that only a simulated fleet has, with their defaults."""


@dataclass(kw_only=True, slots=True)
class EngineSession:
    """A `Session` of the real engine. engine: its settings. is_known_machine: whether `hardware` was chosen.

    Nothing is loaded before it runs.
    """

    setup: ServerSetup
    scenario: Scenario
    served: ModelToServe
    engine: EngineSettings
    gateway: GatewaySettings | None
    """Settings of the gateway of a fleet; None: one engine serves."""
    chosen: RealEngine
    is_known_machine: bool
    recorder: Recorder | None = field(init=False, default=None)
    """Records the requests and iterations of the engine; None: the engine is not warm yet."""

    def outcome(self) -> Outcome | None:
        recorder = self.recorder
        if recorder is None or not recorder.num_requests:
            return None
        result = result_of(
            self.scenario,
            recorder,
            is_known_machine=self.is_known_machine,
            has_iterations=self.gateway is None,
        )
        return Outcome(result, recorder.traffic_table())

    def backend(self, on_load: Callable[[AsyncLLM], None] | None = None) -> EngineBackend:
        """Returns the back end; it loads the engine when it starts.

        on_load: called in the loading thread with the engine, before its first request.
        """
        settings = {field.name: getattr(self.engine, field.name) for field in fields(self.engine)}
        limits: dict[str, Any] = {}
        if self.setup.settings.max_waiting is not None:
            limits = {"max_waiting": self.setup.settings.max_waiting, "on_full": "reject"}

        def load() -> Engines:
            if self.gateway is not None:
                replicas = self.scenario.replicas
                return AsyncFleet(self.served.model, replicas=replicas, gateway=self.gateway, **settings)
            llm = AsyncLLM(self.served.model, **limits, **settings)
            if on_load is not None:
                on_load(llm)
            return llm

        return EngineBackend(
            self.served,
            load,
            max_model_len=max_model_len_of(self.served.model.architecture, self.engine),
            adapters=list(self.chosen.lora_modules or ()),
            has_priorities=not isinstance(self.engine.scheduling, Fcfs),
        )

    def front(self, backend: EngineBackend) -> Served:
        """Returns what the server serves."""
        sleep = SleepMode(backend) if self.engine.enable_sleep_mode else None
        return Served(
            WithoutRemoteKv(backend),
            ServingMetrics(lambda: backend.metrics, lambda: ServerState(backend.num_refused)),
            Controls(backend, backend.clear_prefix_cache, sleep),
            is_asleep=lambda: backend.is_asleep,
        )

    def observed(self, backend: EngineBackend, llm: Engines) -> Recorder:
        """Attaches the recorder and the metrics to an idle engine; returns the recorder."""
        max_bytes = self.setup.settings.max_record_mib * (1 << 20)
        if isinstance(llm, AsyncFleet):
            of_fleet = FleetRecorder(llm, max_bytes)
            metrics = FleetMetrics(llm, self.engine, self.served.name)
            llm.log.further, llm.observer = of_fleet, FleetObservers([of_fleet, metrics])
            backend.metrics = metrics.of_engine
            return of_fleet
        recorder = ServingRecorder(llm.engine, max_bytes)
        feed = EngineMetricsFeed(llm.engine, self.engine, self.served.name)
        before = llm.engine.observer
        llm.engine.observer = Observers([recorder, feed, *([] if before is None else [before])])
        backend.metrics.append(feed.metrics)
        return recorder

    @asynccontextmanager
    async def publishing(self) -> AsyncIterator[Callable[[AsyncLLM], None] | None]:
        """Yields the function that lets a new engine publish its KV events; None: they are not published.

        Raises ConfigError if an endpoint cannot be used.
        """
        if not self.setup.kv_events.publishes:
            yield None
            return
        from experiments.serve.kv_events.engine_events import EngineEvents  # noqa: PLC0415 (it needs ZMQ)
        from experiments.serve.kv_events.publisher import Publisher  # noqa: PLC0415

        try:
            topic = self.setup.kv_events.topic_of(0, self.setup.address.port, self.served.name)
            publisher = Publisher(self.setup.kv_events, 0, topic=topic, rank=0)
        except ValueError as error:
            raise ConfigError(str(error)) from None

        def publish(llm: AsyncLLM) -> None:
            events = EngineEvents(llm.engine, publisher, list(self.chosen.lora_modules or ()))
            if not events.listens:
                raise ValueError(NOTHING_TO_REPORT)
            llm.engine.observer = events

        try:
            yield publish
        finally:
            await publisher.close()

    @asynccontextmanager
    async def running(self, stop: Stop, console: Console) -> AsyncIterator[Served]:
        async with self.publishing() as publish:
            backend = self.backend(publish)
            starting = asyncio.create_task(self._start(backend, stop, console))
            try:
                yield self.front(backend)
            finally:
                await starting  # a thread cannot be interrupted while it loads
                await backend.stop()

    async def _start(self, backend: EngineBackend, stop: Stop, console: Console) -> None:
        """Loads the engine and lets requests in; a failure stops the server."""
        try:
            llm = await backend.start()
        except (ValueError, RuntimeError, OSError, ImportError) as error:
            stop.set()
            raise ConfigError(str(error)) from error
        self.recorder = self.observed(backend, llm)
        backend.open()
        number = self.scenario.replicas
        where = "" if self.gateway is None else f" in {number} engine{'s' * (number > 1)}"
        console.print(f"{self.served.name} is loaded and warm{where}", highlight=False)


def prepare_engine(
    setup: ServerSetup, chosen: RealEngine, device: Device, *, is_known_machine: bool
) -> EngineSession:
    """Builds the session. Raises ConfigError for every mistake that shows before the weights are loaded."""
    config, settings = setup.config, setup.settings
    _check_unsimulated(setup.address, settings)
    try:
        served = model_to_serve(chosen.model, config["model"], device, settings.tokenizer)
        resolved = {**config, "model": served.node}
        scenario = build_scenario({key: resolved[key] for key in resolved if key not in SERVER_KEYS})
        gateway = gateway_settings(scenario, settings.max_waiting, sleeps=chosen.enable_sleep_mode)
        engine = engine_settings(scenario, chosen, device, resolved)
        if settings.served_model_name:
            served = served._replace(name=settings.served_model_name[0])
        max_model_len_of(served.model.architecture, engine)
        if gateway is not None and setup.kv_events.publishes:
            raise ValueError(
                f"replicas={scenario.replicas}: a fleet of engines publishes no KV events; set "
                "serve.kv_events.enable_kv_cache_events=false, or replicas=1"
            )
        if is_known_machine:
            scenario.iteration_model()
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        raise ConfigError(str(error)) from error
    return EngineSession(
        setup=setup._replace(config=resolved),
        scenario=scenario,
        served=served,
        engine=engine,
        gateway=gateway,
        chosen=chosen,
        is_known_machine=is_known_machine,
    )


def _check_unsimulated(address: Address, settings: ServeSettings) -> None:
    """Raises ConfigError for settings of simulated time and simulated outputs."""
    if address.time_scale != 1:
        raise ConfigError(
            f"time_scale={address.time_scale}: the real engine has the time of the wall clock; set it to 1"
        )
    for name, default in SIMULATED_ONLY.items():
        if getattr(settings, name) != default:
            raise ConfigError(
                f"serve.{name}={getattr(settings, name)}: is of simulated fleets, and the real engine has "
                "one engine, which generates its own outputs; leave it out"
            )
