"""Writes the run folder of a session: the files of `windtunnel simulate`, and its traffic for a replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from experiments.app.run_folder import print_folder
from experiments.app.terminal import print_summary
from experiments.serve.settings import OutputSettings
from sim.metrics.result import RunResult
from sim.report.files import write_result, write_table
from sim.workload.traffic_log import FILE as TRAFFIC


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
