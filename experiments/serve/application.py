"""Assembles a server over a simulated fleet: the fleet, and the application with its routes and features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aiohttp import web

from experiments.serve.approximate_tokenizer import ApproximateTokenizer
from experiments.serve.backend import Backend, Tokenizer
from experiments.serve.batches.routes import add_batch_routes
from experiments.serve.faults import FaultyBackend, fault_middleware
from experiments.serve.http.adapters import add_adapter_routes
from experiments.serve.http.app import make_app
from experiments.serve.http.control import add_control_routes
from experiments.serve.metrics.exporter import add_metrics_route
from experiments.serve.served_names import with_names
from experiments.serve.settings import ServeSettings
from experiments.serve.simulated.answers import Answers
from experiments.serve.simulated.fleet import SimulatedFleet, WaitingLimit
from experiments.serve.simulated.lengths import OutputLengths
from experiments.serve.simulated.metrics import FleetMetrics
from experiments.serve.simulated.remote_kv import RemoteKvLayer
from experiments.serve.simulated.single_replica import PinnedRequests, SingleReplica
from experiments.serve.simulated.sleep import SleepyFleet
from experiments.serve.stop import Stop, refusal_while_draining
from experiments.serve.without_remote_kv import WithoutRemoteKv
from sim.settings.errors import ConfigError
from sim.setup.scenario import Scenario

BACKEND: web.AppKey[Backend] = web.AppKey("backend")
METRICS = web.AppKey("metrics", FleetMetrics)


def build_fleet(scenario: Scenario, settings: ServeSettings, time_scale: float) -> SimulatedFleet:
    """Returns the fleet; its clock does not run yet. Raises ConfigError."""
    try:
        tokenizer = _tokenizer(settings.tokenizer)
        longest = min(pool.max_model_len for pool in scenario.pools_by_name.values())
        fleet = SimulatedFleet(
            scenario,
            tokenizer=tokenizer,
            answers=Answers(
                settings.text, tokenizer, scenario.seed, settings.dataset, settings.tool_call_share
            ),
            lengths=OutputLengths(settings.output_length, scenario.workload, scenario.seed, longest),
            time_scale=time_scale,
            max_record_bytes=settings.max_record_mib * (1 << 20),
            tokens_per_image=settings.image_tokens,
        )
        if settings.cold_start:
            fleet.simulation.start_cold()
        return fleet
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error


def _tokenizer(path: Path | None) -> Tokenizer:
    if path is None:
        return ApproximateTokenizer()
    try:
        from experiments.serve.model_tokenizer import ModelTokenizer  # noqa: PLC0415  (torch, by way of GGUF)
    except ImportError as error:
        raise ConfigError(
            f"serve.tokenizer={path}: needs {error.name}: pip install 'windtunnel[engine]'"
        ) from error
    try:
        return ModelTokenizer.from_path(path)
    except (ValueError, OSError) as error:
        raise ConfigError(f"serve.tokenizer={path}: cannot be read: {error}") from error


def make_application(
    fleet: SimulatedFleet,
    settings: ServeSettings,
    *,
    config: dict[str, Any],
    api_key: str | None = None,
    stop: Stop | None = None,
    hosts: frozenset[str] | None = None,
) -> web.Application:
    """Returns the application. config: the settings, as /server_info shows them. hosts: see `make_app`."""
    sleepy, kept_prefills = SleepyFleet(fleet), fleet.simulation.kept_prefills
    backend: Backend = WithoutRemoteKv(sleepy)
    if kept_prefills is not None:
        kept_prefills.lease_s = settings.kv_lease_duration_s
        backend = RemoteKvLayer(sleepy, fleet, kept_prefills)
    app = _assembled(backend, settings, api_key, stop, hosts)
    app[BACKEND], app[METRICS] = backend, FleetMetrics(fleet, settings.served_model_name)
    add_metrics_route(app, app[METRICS].serving)
    add_adapter_routes(app, fleet)
    named = with_names(backend, settings.served_model_name)
    add_batch_routes(app, named, is_draining=lambda: stop is not None and stop.first.is_set())
    add_control_routes(
        app,
        sleep_control=sleepy,
        clear_prefix_caches=fleet.simulation.clear_prefix_caches,
        config=config,
    )
    if settings.expose == "replicas":
        PinnedRequests(fleet)
    if settings.max_waiting is not None:
        WaitingLimit(fleet, settings.max_waiting)
    return app


def make_replica_application(
    index: int,
    fleet_app: web.Application,
    fleet: SimulatedFleet,
    settings: ServeSettings,
    *,
    api_key: str | None = None,
    stop: Stop | None = None,
    hosts: frozenset[str] | None = None,
) -> web.Application:
    """Returns the application of one replica. fleet_app: that of the fleet; the others as for it."""
    backend = SingleReplica(fleet_app[BACKEND], fleet, index)
    app = _assembled(backend, settings, api_key, stop, hosts)
    add_metrics_route(app, fleet_app[METRICS].of_replica(index))
    return app


def _assembled(
    backend: Backend,
    settings: ServeSettings,
    api_key: str | None,
    stop: Stop | None,
    hosts: frozenset[str] | None,
) -> web.Application:
    """Returns the routes of a back end, with what every application of a server has."""
    named = with_names(backend, settings.served_model_name)
    app = make_app(FaultyBackend(named) if settings.faults else named, api_key, hosts)
    if stop is not None:
        app.middlewares.append(refusal_while_draining(stop, settings.drain_s))
    if settings.faults:
        app.middlewares.append(fault_middleware)
    return app
