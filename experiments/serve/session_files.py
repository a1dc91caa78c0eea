"""Writes the run folder of a session: the files of `windtunnel simulate`, and its traffic for a replay."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from experiments.app.run_folder import print_folder
from experiments.app.terminal import print_summary
from experiments.serve.settings import OutputSettings
from sim.metrics.result import RunResult
from sim.report.files import write_table
from sim.report.run_files import write_result
from sim.settings.errors import ConfigError
from sim.workload.recording import FILE as TRAFFIC


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


def write_session(
    folder: Path,
    result: RunResult,
    config: dict[str, Any],
    traffic: pd.DataFrame,
    output: OutputSettings,
    console: Console,
) -> None:
    """Prints the summary and writes the files. traffic: see `TrafficLog.table`."""
    print_summary(result.summary, console)
    folder.mkdir(parents=True, exist_ok=True)
    if output.tables:
        write_table(traffic, folder / TRAFFIC)
    write_result(folder, result, config, tables=output.tables, report=output.report)
    print_folder(folder, console)
