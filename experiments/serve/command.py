"""`windtunnel serve`: an OpenAI-compatible endpoint over a simulated fleet or the real engine."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from experiments.app.application import Application, launch
from experiments.app.job import Job
from experiments.app.run_folder import SERVER_KEYS
from experiments.app.settings.compose import Composition
from experiments.app.settings.override import Override
from experiments.serve.arguments import with_checkpoint, without_flags
from experiments.serve.engine.settings import Device, RealEngine
from experiments.serve.kv_events.settings import PACKAGES as KV_EVENTS_PACKAGES
from experiments.serve.kv_events.settings import KvEventsSettings
from experiments.serve.settings import Address, BackEnd, OutputSettings, ServerSetup, ServeSettings
from sim.metrics.slo import check_no_workload_terms
from sim.settings.build import build_as
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run

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
    setup = ServerSetup(cfg, address, settings, kv_events, output)
    if back_end.backend == "engine":
        chooses_hardware = any(Override.parse(word).root == "hardware" for word in composition.overrides)
        return _engine_job(setup, chosen, back_end.device, is_known_machine=chooses_hardware)
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
    from experiments.serve.driver import ServeJob  # noqa: PLC0415  (it needs aiohttp)
    from experiments.serve.simulated.session import FleetSession  # noqa: PLC0415

    return ServeJob(FleetSession(setup=setup, scenario=scenario))


def _engine_job(setup: ServerSetup, chosen: RealEngine, device: Device, *, is_known_machine: bool) -> Job:
    try:
        from experiments.serve.driver import ServeJob  # noqa: PLC0415  (it needs aiohttp)
        from experiments.serve.engine.job import prepare_engine  # noqa: PLC0415  (torch: seconds)
    except ImportError as error:
        raise ConfigError(f"backend=engine: needs {error.name}: pip install 'windtunnel[engine]'") from error
    return ServeJob(prepare_engine(setup, chosen, device, is_known_machine=is_known_machine))


def _check_installed(packages: Sequence[str], what: str) -> None:
    """Raises ConfigError if a package that `what` needs is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{what} needs {' and '.join(missing)}: pip install 'windtunnel[serve]'")
