"""Runs whose tables are written while they go on, in memory that does not grow with their length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.app.progress import simulated_time
from experiments.app.run_folder import print_folder
from experiments.app.terminal import print_summary
from experiments.simulate.output import STREAMED_ABOVE, SimulateOutput
from sim.records.timed_rows import interval_s
from sim.report.config_text import config_yaml
from sim.report.exact_percentiles import add_exact_percentiles
from sim.report.files import summary_json
from sim.report.page import write_report
from sim.report.streamed_tables import PLOTS, REQUESTS, StreamedTables, check_free_space
from sim.report.whole_file import write_whole
from sim.settings.errors import ConfigError
from sim.settings.scenario import errors_of_user
from sim.setup.scenario import Scenario
from sim.setup.streamed_run import StreamedRun
from sim.shards.accumulators import accumulator_bytes
from sim.workload.base import Source


def run_streamed(
    scenario: Scenario,
    source: Source,
    output: SimulateOutput,
    *,
    config: dict[str, Any],
    folder: Path,
    console: Console,
) -> None:
    """Simulates, writes and prints. config: the resolved config.

    Raises ConfigError if the disk has no room for the tables; OSError if they could not be written, after
    what had been simulated by then was printed; and KeyboardInterrupt after Ctrl-C.
    """
    try:
        check_free_space(folder, source.num_requests or 0, iterations=output.writes_iterations)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "config.yaml", config_yaml(config))
    if output.tables == "auto":
        _note(
            console,
            f"More than {STREAMED_ABOVE:,} requests: their rows are written while the run goes on, without "
            "iterations and events (output.tables=true writes all, in "
            "4.4 kB of memory per request).",
        )
    width_s = interval_s(scenario.num_replicas) if output.writes_iterations else None
    tables = StreamedTables(folder, scenario.slo, width_s=width_s)
    with (
        errors_of_user(scenario),
        simulated_time(console, source, scenario.sim.until_s, enabled=output.progress) as report,
    ):
        run = StreamedRun(scenario, source, tables, plots=output.report)
        summary = run.run(report)
    if run.error is None and scenario.metrics.percentiles == "exact":
        add_exact_percentiles(summary, folder / REQUESTS)
    print_summary(summary, console)
    if run.error is not None:
        raise run.error
    write_whole(folder / "summary.json", summary_json(summary))
    if output.report:
        page, plots = folder / "report.html", run.figures.plots(run.end)
        write_whole(folder / PLOTS, accumulator_bytes(plots))
        write_report(page, plots, run.end, summary, config, scenario.slo)
    for figure, reason in summary["not_computed"].items():
        _note(console, f"{figure} is not computed: {reason}.")
    print_folder(folder, console)
    if summary["interrupted"]:
        raise KeyboardInterrupt


def _note(console: Console, text: str) -> None:
    console.print(text, style="yellow", highlight=False)
