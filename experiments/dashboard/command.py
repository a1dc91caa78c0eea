"""`windtunnel dashboard`: a page on this machine that simulates while its settings are turned."""

from __future__ import annotations

import argparse
import errno
import importlib
import importlib.util
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.dashboard.controls import Board, board_of
from experiments.dashboard.simulation_service import SimulationService
from sim.settings.compose import ConfigSource
from sim.settings.config_groups import config_dirs
from sim.settings.errors import ConfigError
from sim.settings.renamed import with_new_names
from sim.settings.scenario import build_run

HOST = "127.0.0.1"
PORT = 8050
TRIED_PORTS = 100
"""Behind a taken one, to propose a free one."""

DESCRIPTION = """\
Serves a local page that simulates 2,000 requests whenever the model, GPU, replicas, engine, rate, lengths or
SLO are changed. The address of the page contains all changes; the page also shows the equivalent command.

Overrides are those of `windtunnel simulate` (see its --help); they apply to all simulations of the page."""


def main(arguments: Sequence[str]) -> None:
    """Serve until Ctrl-C. Raises ConfigError for whatever a user can mend."""
    options = _parser().parse_intermixed_args(arguments)
    sys.path.append(os.getcwd())  # a user's own classes
    if importlib.util.find_spec("dash") is None:
        raise ConfigError("dash is not installed: pip install 'windtunnel[dashboard]'")
    check_port(options.port)
    board = build_board(options.config_dir, options.overrides)
    with SimulationService(board) as service:
        service.warm()
        app = importlib.import_module("experiments.dashboard.app").make_app(service)
        print(f"http://{HOST}:{options.port}  (Ctrl-C ends it)", flush=True)
        serve(app, options.port)


def build_board(config_dir: Path | None, overrides: Sequence[str]) -> Board:
    """The controls, and what they are changes of, built once. Raises ConfigError."""
    source = ConfigSource(config_name="simulate", dirs=config_dirs(config_dir))
    board = board_of(source, with_new_names(overrides))
    build_run(board.cfg)
    return board


def serve(app: Any, port: int) -> None:
    """On this machine alone, a thread a request, until Ctrl-C."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    serving = importlib.import_module("werkzeug.serving")
    server = serving.make_server(HOST, port, app.server, threaded=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()


def check_port(port: int) -> None:
    """Raise ConfigError for a port that cannot be had, with the next that can."""
    if not 1 <= port <= 65535:
        raise ConfigError(f"--port={port}: must be 1 to 65535")
    problem = _problem(port)
    if problem is None:
        return
    after = range(max(port, 1023) + 1, min(port + TRIED_PORTS, 65535) + 1)
    free = next((other for other in after if _problem(other) is None), None)
    advice = f"; free: --port {free}" if free else ""
    raise ConfigError(f"--port={port}: {problem}{advice}")


def _problem(port: int) -> str | None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that was just closed will do
        try:
            probe.bind((HOST, port))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            return "another program uses this port" if taken else str(error.strerror)
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="windtunnel dashboard",
        usage="windtunnel dashboard [group=choice ...] [key=value ...] [--port PORT] [--config-dir DIR]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--port", type=int, default=PORT, help=f"port on {HOST}; default: {PORT}")
    parser.add_argument("--config-dir", type=Path, help="a folder with your own configs")
    return parser
