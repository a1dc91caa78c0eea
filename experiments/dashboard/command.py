"""`windtunnel dashboard`: serves a local web page that simulates again whenever a setting is changed."""

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

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import config_dirs, find_groups
from experiments.app.settings.override import check_chosen_once
from experiments.app.settings.renamed import with_new_names
from experiments.dashboard.controls import Board, board_of
from experiments.dashboard.simulation_service import SimulationService
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run

HOST = "127.0.0.1"
PORT = 8050
TRIED_PORTS = 100
"""Ports after one in use that are tried, to propose a free one."""

DESCRIPTION = """\
Serves a local web page that simulates 2,000 requests whenever the model, GPU, number of replicas, engine,
request rate, lengths or SLO is changed. The address of the page contains all changes, and the page shows the
equivalent command.

Overrides are those of `windtunnel simulate` (see its --help). They apply to all simulations of the page."""


def main(arguments: Sequence[str]) -> None:
    """Serves the page until Ctrl-C. Raises ConfigError for a wrong setting or port, and without dash."""
    options = _parser().parse_intermixed_args(arguments)
    sys.path.append(os.getcwd())  # for the user's own classes
    if importlib.util.find_spec("dash") is None:
        raise ConfigError("dash is not installed: pip install 'windtunnel[dashboard]'")
    check_port(options.port)
    board = build_board(options.config_dir, options.overrides)
    with SimulationService(board) as service:
        service.warm()
        app = importlib.import_module("experiments.dashboard.app").make_app(service)
        print(f"http://{HOST}:{options.port}  (press Ctrl-C to stop)", flush=True)
        serve(app, options.port)


def build_board(config_dir: Path | None, overrides: Sequence[str]) -> Board:
    """Builds the controls, and checks that the default state can be built. Raises ConfigError."""
    source = ConfigSource(config_name="simulate", dirs=config_dirs(config_dir))
    named = with_new_names(overrides, source.dirs)
    check_chosen_once(named, find_groups(source.dirs))
    board = board_of(source, named)
    build_run(board.cfg)
    return board


def serve(app: Any, port: int) -> None:
    """Serves on this machine only, with one thread per request, until Ctrl-C."""
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
    """Raises ConfigError if the port cannot be used, and names the next free one."""
    if not 1 <= port <= 65535:
        raise ConfigError(f"--port={port}: must be a whole number from 1 to 65535")
    problem = _problem(port)
    if problem is None:
        return
    after = range(max(port, 1023) + 1, min(port + TRIED_PORTS, 65535) + 1)
    free = next((other for other in after if _problem(other) is None), None)
    advice = f"; use a free one, such as --port {free}" if free else ""
    raise ConfigError(f"--port={port}: {problem}{advice}")


def _problem(port: int) -> str | None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just closed is free
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
    parser.add_argument(
        "overrides", nargs="*", help="group=choice or key=value, as for `windtunnel simulate`"
    )
    parser.add_argument("--port", type=int, default=PORT, help=f"port on {HOST}; default: {PORT}")
    parser.add_argument("--config-dir", type=Path, help="a folder with your own configs")
    return parser
