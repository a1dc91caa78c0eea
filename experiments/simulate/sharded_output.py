"""Runs in shards without whole tables: summary, requests, replicas, series, in constant memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from experiments.app.run_folder import print_folder
from experiments.app.terminal import print_summary
from experiments.simulate.output import SimulateOutput
from experiments.simulate.sharded_run import ShardedRun
from sim.records.timed_rows import empty_tables
from sim.report.config_text import config_yaml
from sim.report.exact_percentiles import add_exact_percentiles
from sim.report.files import remove_folder_of_table, summary_json, write_table
from sim.report.page import write_report
from sim.report.saved import BURSTS, GAPS, saved_records
from sim.report.streamed_tables import PLOTS, REPLICAS, REQUESTS, SERIES, TableFolder
from sim.report.whole_file import write_whole
from sim.shards.accumulators import accumulator_bytes
from sim.shards.intervals import merged_intervals
from sim.shards.request_rows import merged_groups
from sim.shards.shard_file import ShardMember
from sim.shards.streamed import StreamedShards, measured_rows


def run_sharded_streamed(
    sharded: ShardedRun,
    output: SimulateOutput,
    *,
    config: dict[str, Any],
    folder: Path,
    console: Console,
) -> None:
    """Simulates, writes and prints. config: the resolved config.

    Raises what `simulated` raises, and OSError if the tables could not be written, after what had been
    simulated was printed; shards are kept then.
    """
    scenario = sharded.scenario
    with sharded.simulated(folder, console) as shards:
        with shards.files() as files:
            run = sharded.streamed(files)
            summary = run.figures.summary(run.end)
            summary["memory"] = asdict(next(iter(scenario.pools_by_name.values())).plan_memory())
            scenario.describe(summary, run.notes, scenario.pool_hardware())
            write_whole(folder / "config.yaml", config_yaml(config))
            try:
                _write_tables(sharded, run, folder, iterations=output.writes_iterations)
                if scenario.metrics.percentiles == "exact":
                    add_exact_percentiles(summary, folder / REQUESTS)
            finally:
                print_summary(summary, console)
            write_whole(folder / "summary.json", summary_json(summary))
            if output.report:
                page, plots = folder / "report.html", run.figures.plots(run.end)
                write_whole(folder / PLOTS, accumulator_bytes(plots))
                write_report(page, plots, run.end, summary, config, scenario.slo)
        shards.remove()
    for figure, reason in summary["not_computed"].items():
        console.print(f"{figure} is not computed: {reason}.", style="yellow", highlight=False)
    print_folder(folder, console)


def _write_tables(sharded: ShardedRun, run: StreamedShards, folder: Path, *, iterations: bool) -> None:
    """Writes the tables that a run which streams has; those of an earlier attempt are replaced.

    iterations: also those of iterations and gaps.
    """
    remove_folder_of_table(folder / REQUESTS)
    requests = TableFolder(folder / REQUESTS)
    for rows in merged_groups(run.rows):
        requests.add(measured_rows(rows, sharded.scenario.slo))
    if requests.is_empty:
        requests.add(measured_rows(run.end.requests, sharded.scenario.slo))
    write_table(run.replicas, folder / REPLICAS)
    write_table(run.series.table(), folder / SERIES)
    if iterations:
        for name, nothing in empty_tables(run.end).items():
            _write_intervals(folder / f"{name}.parquet", name, run.intervals.get(name, ()), nothing)
    for name, content in saved_records(run.end):
        if name not in (GAPS, BURSTS):
            write_whole(folder / name, content)


def _write_intervals(path: Path, name: str, shards: Sequence[ShardMember], nothing: pd.DataFrame) -> None:
    """Writes a table of iterations or gaps. nothing: the table without rows."""
    remove_folder_of_table(path)
    table = TableFolder(path)
    for rows in merged_intervals(name, shards):
        table.add(rows)
    if table.is_empty:
        table.add(nothing)
