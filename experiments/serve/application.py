"""Assembles the application of a server over a simulated fleet: its routes and its attached features."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from experiments.serve.faults import FaultyBackend, fault_middleware
from experiments.serve.http.adapters import add_adapter_routes
from experiments.serve.http.app import make_app
from experiments.serve.http.control import add_control_routes
from experiments.serve.metrics.route import add_metrics_route
from experiments.serve.settings import ServeSettings
from experiments.serve.simulated.fleet import SimulatedFleet
from experiments.serve.simulated.fleet_metrics import FleetMetrics
from experiments.serve.simulated.sleep import SleepyFleet
from experiments.serve.stop import Stop, refusal_while_draining


def make_application(
    fleet: SimulatedFleet,
    settings: ServeSettings,
    *,
    config: dict[str, Any],
    api_key: str | None = None,
    stop: Stop | None = None,
) -> web.Application:
    """Returns the application. config: the resolved settings, as /server_info shows them."""
    backend = SleepyFleet(fleet)
    app = make_app(FaultyBackend(backend) if settings.faults else backend, api_key)
    add_metrics_route(app, FleetMetrics(fleet).serving)
    add_adapter_routes(app, fleet)
    add_control_routes(
        app,
        sleep_control=backend,
        clear_prefix_caches=fleet.simulation.clear_prefix_caches,
        config=config,
    )
    if stop is not None:
        app.middlewares.append(refusal_while_draining(stop, settings.drain_s))
    if settings.faults:
        app.middlewares.append(fault_middleware)
    return app
