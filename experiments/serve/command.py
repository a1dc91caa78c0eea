"""`windtunnel serve`: an OpenAI-compatible endpoint over a simulated fleet or the real engine."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from experiments.app.application import Application, launch
from experiments.app.job import Job
from experiments.app.run_folder import SERVER_KEYS
from experiments.app.settings.compose import Composition
from experiments.app.settings.override import Override
from experiments.app.terminal import terminal_console
from experiments.serve.arguments import with_checkpoint, without_flags
from experiments.serve.engine.settings import RealEngine
from experiments.serve.kv_events.settings import PACKAGES as KV_EVENTS_PACKAGES
from experiments.serve.kv_events.settings import KvEventsSettings
from experiments.serve.session_files import sole_server, write_session
from experiments.serve.settings import (
    KEY_VARIABLE,
    Address,
    BackEnd,
    OutputSettings,
    ServeSettings,
    full_note,
    hosts_of,
)
from sim.metrics.slo import check_no_workload_terms
from sim.records.run import RunRecords
from sim.settings.build import build_as, policy_errors
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run
from sim.setup.scenario import Scenario
from sim.workload.base import WorkloadNotes

if TYPE_CHECKING:
    import pandas as pd
    from aiohttp import web

    from experiments.serve.kv_events.fleet_events import FleetEvents
    from experiments.serve.replica_ports import ReplicaPorts
    from experiments.serve.simulated.fleet import SimulatedFleet
    from experiments.serve.stop import Stop

PACKAGES = ("aiohttp", "prometheus_client", "pydantic")
"""Packages of the extra `serve`."""


APPLICATION = Application(
    name="serve",
    summary="Serve an OpenAI-compatible endpoint over a simulated fleet, or over the real engine.",
    module="experiments.serve.command",
    config_name="serve",
)


def main(arguments: Sequence[str]) -> None:
    """Runs the command, which takes flags of `vllm serve`, too. Raises what `launch` raises.

    With backend=engine, `model=` may name a checkpoint.
    """
    launch(APPLICATION, with_checkpoint(without_flags(arguments)))


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeJob:
    """A simulated fleet and its server; nothing listens before `run`."""

    cfg: dict[str, Any]
    scenario: Scenario
    address: Address
    settings: ServeSettings
    kv_events: KvEventsSettings
    output: OutputSettings

    def run(self, folder: Path) -> None:
        """Serves until it is stopped; then writes and prints what happened, as `windtunnel simulate` does."""
        with sole_server(folder):
            self._run(folder, terminal_console())

    def _run(self, folder: Path, console: Console) -> None:
        records, traffic, full_s = asyncio.run(self._serve(console))
        if not len(records.requests):
            console.print("no request came; nothing is written", highlight=False)
            return
        result = self.scenario.result(records, WorkloadNotes())
        if full_s is not None:
            result.summary["notes"].append(full_note(full_s))
        write_session(folder, result, self.cfg, traffic, self.output, console)

    def fleet(self) -> SimulatedFleet:
        """Returns the fleet; its clock does not run yet. Raises ConfigError."""
        from experiments.serve.application import build_fleet  # noqa: PLC0415 (it needs aiohttp)

        return build_fleet(self.scenario, self.settings, self.address.time_scale)

    def app(
        self, fleet: SimulatedFleet, api_key: str | None = None, stop: Stop | None = None
    ) -> web.Application:
        """Returns the application in front of a fleet. stop: of the server, which then refuses requests."""
        from experiments.serve.application import make_application  # noqa: PLC0415 (it needs aiohttp)

        config = self.cfg
        return make_application(
            fleet, self.settings, config=config, api_key=api_key, stop=stop, hosts=self._hosts
        )

    @property
    def _hosts(self) -> frozenset[str] | None:
        return hosts_of(self.address.host, self.settings.allowed_hosts)

    def replica_ports(
        self,
        fleet: SimulatedFleet,
        app: web.Application,
        on_ready: Callable[[int, str], None],
        api_key: str | None = None,
        stop: Stop | None = None,
    ) -> ReplicaPorts:
        """Returns the ports of the replicas. app: that of the fleet. on_ready: see `ReplicaPorts`."""
        from experiments.serve.application import make_replica_application  # noqa: PLC0415 (aiohttp)
        from experiments.serve.replica_ports import ReplicaPorts  # noqa: PLC0415

        def make(index: int) -> web.Application:
            return make_replica_application(
                index, app, fleet, self.settings, api_key=api_key, stop=stop, hosts=self._hosts
            )

        return ReplicaPorts(fleet, make, self.address, on_ready)

    def publishing(self, fleet: SimulatedFleet) -> FleetEvents:
        """Returns the context in which the replicas publish their KV events."""
        from experiments.serve.kv_events.fleet_events import FleetEvents  # noqa: PLC0415 (it needs ZMQ)

        return FleetEvents(fleet, self.kv_events, self.address, self.settings.expose)

    async def _serve(self, console: Console) -> tuple[RunRecords, pd.DataFrame, float | None]:
        """Serves; returns the records, the traffic for a replay, and when the memory for them was full."""
        from experiments.serve.server import serve_app  # noqa: PLC0415 (it needs aiohttp)
        from experiments.serve.stop import stop_on_signals  # noqa: PLC0415

        settings, fleet, key = self.settings, self.fleet(), os.environ.get(KEY_VARIABLE)
        fleet.driver.start()
        async with AsyncExitStack() as until_end:
            stop = until_end.enter_context(stop_on_signals())
            if self.kv_events.publishes:
                await until_end.enter_async_context(self.publishing(fleet))
            app = self.app(fleet, key, stop)
            if settings.expose == "replicas":
                ports = self.replica_ports(
                    fleet,
                    app,
                    lambda index, url: console.print(f"{url}  (replica {index})", highlight=False),
                    key,
                    stop,
                )
                await until_end.enter_async_context(ports)
            await serve_app(
                app,
                self.address,
                stop,
                duration_s=settings.duration_s,
                drain_s=settings.drain_s,
                num_in_progress=lambda: fleet.num_in_progress,
                on_ready=lambda url: console.print(f"{url}  (Ctrl-C stops)", highlight=False),
            )
        fleet.driver.stop()
        if fleet.driver.failure is not None:
            with policy_errors(self.scenario):
                raise fleet.driver.failure
        return fleet.simulation.close(), fleet.traffic_table(), fleet.records_full_s


def prepare(cfg: dict[str, Any], composition: Composition) -> Job:
    """Builds everything that the server needs. Raises ConfigError."""
    _check_installed(PACKAGES, "serve")
    node = dict(cfg["serve"])
    chosen: RealEngine = build_as(RealEngine, node.pop("engine"), "serve.engine")
    kv_events: KvEventsSettings = build_as(KvEventsSettings, node.pop("kv_events"), "serve.kv_events")
    if kv_events.publishes:
        _check_installed(KV_EVENTS_PACKAGES, "serve.kv_events")
    settings: ServeSettings = build_as(ServeSettings, node, "serve")
    address: Address = build_as(Address, {key: cfg[key] for key in ("host", "port", "time_scale")}, "")
    back_end: BackEnd = build_as(BackEnd, {key: cfg[key] for key in ("backend", "device")}, "")
    output: OutputSettings = build_as(OutputSettings, cfg["output"], "output")
    if back_end.backend == "engine":
        chooses_hardware = any(Override.parse(word).root == "hardware" for word in composition.overrides)
        return _engine_job(
            cfg,
            chosen=chosen,
            device=back_end.device,
            address=address,
            settings=settings,
            kv_events=kv_events,
            output=output,
            own_keys=SERVER_KEYS,
            is_known_machine=chooses_hardware,
        )
    given = [word for word in composition.overrides if Override.parse(word).name.startswith("serve.engine.")]
    if given:
        raise ConfigError(
            f"{given[0]}: is of the real engine, and backend={back_end.backend} has none; add "
            "backend=engine, or leave it out"
        )
    scenario, _ = build_run({key: cfg[key] for key in cfg if key not in SERVER_KEYS})
    served = {pool.model.name for pool in scenario.pools_by_name.values()}
    if settings.served_model_name is not None and len(served) > 1:
        raise ConfigError(
            f"serve.served_model_name={settings.served_model_name}: the pools serve {len(served)} models "
            f"({', '.join(sorted(served))}), whose own names tell them apart; set it to null"
        )
    try:
        check_no_workload_terms(scenario.slo, "serve")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return ServeJob(
        cfg=cfg,
        scenario=scenario,
        address=address,
        settings=settings,
        kv_events=kv_events,
        output=output,
    )


def _check_installed(packages: Sequence[str], what: str) -> None:
    """Raises ConfigError if a package that `what` needs is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{what} needs {' and '.join(missing)}: pip install 'windtunnel[serve]'")


def _engine_job(config: Mapping[str, Any], **settings: Any) -> Job:
    try:
        from experiments.serve.engine.job import prepare_engine  # noqa: PLC0415  (torch: seconds)
    except ImportError as error:
        raise ConfigError(f"backend=engine: needs {error.name}: pip install 'windtunnel[engine]'") from error
    return prepare_engine(config, **settings)
