"""The driver of a server: runs a back end behind its application until the stop, and writes the run folder.

A back end joins by a `Session`, which says what it serves meanwhile and what has happened in the end. The run
folder has the files of `windtunnel simulate`, and the traffic for a replay.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import pandas as pd
from aiohttp import web
from rich.console import Console

from experiments.app.run_folder import print_folder
from experiments.app.terminal import print_summary, terminal_console
from experiments.serve.backend import Backend
from experiments.serve.batches.routes import add_batch_routes
from experiments.serve.faults import FaultyBackend, fault_middleware
from experiments.serve.http.app import make_app
from experiments.serve.http.control import (
    AdapterControl,
    SleepMode,
    add_adapter_routes,
    add_control_routes,
)
from experiments.serve.layers import with_names
from experiments.serve.metrics.exporter import ServingMetrics, add_metrics_route
from experiments.serve.server import Stop, refusal_while_draining, serve_app, stop_on_signals
from experiments.serve.settings import KEY_VARIABLE, ServerSetup
from sim.metrics.result import RunResult
from sim.report.files import write_table
from sim.report.run_files import write_result
from sim.settings.errors import ConfigError
from sim.workload.recording import FILE as TRAFFIC


class Controls(NamedTuple):
    """Controls of a back end, on which routes act. sleep: None: the server may not sleep."""

    adapters: AdapterControl
    clear_prefix_caches: Callable[[], None]
    sleep: SleepMode | None


class Served(NamedTuple):
    """A back end, its metrics, and its controls; None: it is a part of another server, which has them.

    is_asleep: whether nothing goes on, so that the end of a request would be waited for in vain.
    """

    backend: Backend
    metrics: ServingMetrics
    controls: Controls | None
    is_asleep: Callable[[], bool] = lambda: False


class Outcome(NamedTuple):
    """The figures of a session. traffic: see `TrafficLog.table`."""

    result: RunResult
    traffic: pd.DataFrame


class Session(Protocol):
    """A back end from its start to its end."""

    @property
    def setup(self) -> ServerSetup:
        """The settings of the server."""
        ...

    def running(self, stop: Stop, console: Console) -> AbstractAsyncContextManager[Served]:
        """Starts the back end, and ends it after the server. Raises ConfigError.

        stop: of the server; a back end that fails to start sets it. console: for what the user should know.
        """
        ...

    def outcome(self) -> Outcome | None:
        """Returns what has happened, once it has ended; None: no request came."""
        ...


@dataclass(frozen=True, slots=True)
class ServeJob:
    """A server; nothing listens and nothing is loaded before `run`."""

    session: Session

    def run(self, folder: Path) -> None:
        """Serves until it is stopped; then writes and prints what happened."""
        with sole_server(folder):
            console = terminal_console()
            asyncio.run(self._serve(console))
            outcome = self.session.outcome()
            if outcome is None:
                console.print("no request came; nothing is written", highlight=False)
            else:
                self._write(folder, outcome, console)

    async def _serve(self, console: Console) -> None:
        setup = self.session.setup
        with stop_on_signals() as stop:
            async with self.session.running(stop, console) as served:
                await serve_app(
                    make_application(served, setup, os.environ.get(KEY_VARIABLE), stop),
                    setup.address,
                    stop,
                    duration_s=setup.settings.duration_s,
                    drain_s=setup.settings.drain_s,
                    num_in_progress=lambda: served.backend.num_in_progress,
                    is_asleep=served.is_asleep,
                    on_ready=lambda url: console.print(f"{url}  (Ctrl-C stops)", highlight=False),
                )

    def _write(self, folder: Path, outcome: Outcome, console: Console) -> None:
        """Prints the summary and writes the files."""
        (result, traffic), setup = outcome, self.session.setup
        print_summary(result.summary, console)
        folder.mkdir(parents=True, exist_ok=True)
        if setup.output.tables:
            write_table(traffic, folder / TRAFFIC)
        write_result(folder, result, setup.config, tables=setup.output.tables, report=setup.output.report)
        print_folder(folder, console)


def make_application(
    served: Served, setup: ServerSetup, api_key: str | None = None, stop: Stop | None = None
) -> web.Application:
    """Returns the application: its routes, and the features that it attaches.

    api_key: that requests must have; None: they need none. stop: of the server, which then refuses requests.
    """
    settings, controls = setup.settings, served.controls
    named = with_names(served.backend, settings.served_model_name)
    app = make_app(FaultyBackend(named) if settings.faults else named, api_key, setup.hosts)
    add_metrics_route(app, served.metrics)
    if controls is not None:
        add_batch_routes(app, named, is_draining=lambda: stop is not None and stop.first.is_set())
        add_adapter_routes(app, controls.adapters)
        add_control_routes(app, controls.sleep, controls.clear_prefix_caches, setup.config)
    if stop is not None:
        app.middlewares.append(refusal_while_draining(stop, settings.drain_s))
    if settings.faults:
        app.middlewares.append(fault_middleware)
    return app


@contextmanager
def sole_server(folder: Path) -> Iterator[None]:
    """Keeps other servers from the run folder, which exists, until this one has written its files.

    Raises ConfigError if another server has it. The lock ends with the process, however it ends.
    """
    try:
        import fcntl  # noqa: PLC0415  (not on Windows, where a folder cannot be locked)
    except ImportError:
        yield
        return
    locked = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"hydra.run.dir={folder}: another server, which still runs, will write its files there; "
                "choose another folder"
            ) from None
        yield
    finally:
        os.close(locked)
