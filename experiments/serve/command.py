"""`windtunnel serve`: an OpenAI-compatible endpoint over a simulated fleet or the real engine."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.app.application import Application, launch
from experiments.app.job import Job
from experiments.app.run_folder import SERVER_KEYS
from experiments.app.settings.compose import Composition
from experiments.app.settings.override import Override
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
SETTINGS = {
    "--host": "host",
    "--port": "port",
    "--model": "model",
    "--served-model-name": "serve.served_model_name",
    "--allowed-hosts": "serve.allowed_hosts",
}
"""The setting of each flag; the last two take several values."""
LISTS = ("--served-model-name", "--allowed-hosts")
SMOLLM2 = "smollm2"
CHECKPOINT = "serve.engine.model"


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


def without_flags(words: Sequence[str]) -> list[str]:
    """Returns the words with the setting of each flag in its place.

    As in vLLM, a model that is named by --model has this name for clients, too. Raises ConfigError for a flag
    without a value.
    """
    found: list[str] = []
    rest, model = list(words), None
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        if flag not in SETTINGS:
            found.append(f"{flag}{equals}{value}")
            continue
        values = [value] if equals else []
        while rest and (flag in LISTS or not values) and not rest[0].startswith("--") and "=" not in rest[0]:
            values.append(rest.pop(0))
        if not all(values) or not values:
            raise ConfigError(f"{flag}: needs a value, as in {flag}=VALUE or {SETTINGS[flag]}=VALUE")
        if flag == "--model":
            model = values[0]
        text = ",".join(map(quoted, values)) if flag in LISTS else values[0]
        found.append(f"{SETTINGS[flag]}=[{text}]" if flag in LISTS else f"{SETTINGS[flag]}={text}")
    if model is not None and not any(word.startswith("serve.served_model_name=") for word in found):
        found.append(f"serve.served_model_name=[{quoted(model)}]")
    return found


def with_checkpoint(words: Sequence[str]) -> list[str]:
    """Returns the words with `serve.engine.model=` for a model that is no choice of the group `model`.

    Those are smollm2, GGUF files, and folders. Without a model, it is smollm2. Other back ends: unchanged.
    """
    found = {parsed.name: parsed for parsed in map(Override.parse, words)}
    backend, model = found.get("backend"), found.get("model")
    if backend is None or backend.value != "engine":
        return list(words)
    if model is None:
        return list(words) if CHECKPOINT in found else [*words, f"{CHECKPOINT}={SMOLLM2}"]
    value = (model.value or "").strip("\"'")
    if value != SMOLLM2 and not value.endswith(".gguf") and not Path(value).is_dir():
        return list(words)
    return [f"{CHECKPOINT}={quoted(value)}" if word == model.text else word for word in words]


def quoted(text: str) -> str:
    """Returns a text as an override has it, whatever its characters."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
