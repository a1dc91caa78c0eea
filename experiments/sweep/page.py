"""Draws a sweep's page and table from its runs.parquet."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from rich.console import Console
from rich.text import Text

from experiments.app.terminal import fits, plain_table
from experiments.study.export import export
from experiments.study.figures import Metric, titled, unit_of
from experiments.study.pages import settings_text
from experiments.study.study import Findings, Page
from experiments.study.verdicts import LEVEL
from experiments.sweep.figures import heat_map, lines, parallel, pareto_front
from experiments.sweep.folder import DONE, FAILED, REFUSED, SweepFolder
from experiments.sweep.grid import PARETO, Cell, Grid, grid_of
from experiments.sweep.settings import ReportSettings
from sim.report.numbers import with_interval
from sim.report.plain_page import Content, listed, table, write_page
from sim.report.wording import plural

PAGE = "sweep.html"
PARETO_TITLE = "pareto front"
PRINTED_ROWS, PAGE_ROWS = 20, 1000
PRINTED_METRICS = 4


def of_folder(folder: SweepFolder, settings: ReportSettings) -> Grid:
    """Builds the grid of a sweep. Raises ConfigError for axes or metrics that the sweep does not have."""
    keys = [axis.key for axis in folder.plan.axes]
    return grid_of(folder.table(), keys, settings, _caveats(folder))


def write(grid: Grid, folder: SweepFolder, settings: ReportSettings) -> list[Path]:
    """Writes the page and the requested images. Raises ConfigError if images cannot be made."""
    written = []
    if "html" in settings.format:
        write_page(folder.path / PAGE, *page_of(grid, folder))
        written.append(folder.path / PAGE)
    images = [name for name in settings.format if name != "html"]
    return written + (export(drawings(grid), folder.path / "figures", images) if images else [])


def findings_of(folder: SweepFolder, settings: ReportSettings, *, is_whole: bool) -> Findings:
    """Returns the findings of a sweep, which has no verdict: they show its table and its figures."""
    grid = of_folder(folder, settings)
    return Findings(
        name="sweep",
        config=_about(folder),
        tables={"runs": folder.table()},
        verdicts=(),
        caveats=grid.caveats,
        record={"done": folder.num_of(DONE), "failed": folder.num_of(FAILED)},
        show=partial(print_found, grid),
        draw=partial(page_of, grid, folder),
        is_whole=is_whole,
        failure="" if folder.num_of(FAILED) else None,
    )


def drawings(grid: Grid) -> dict[str, go.Figure]:
    """Returns the figures by name, in the order of the page."""
    found: dict[str, go.Figure | None] = {}
    for metric in grid.metrics:
        found[f"lines {metric.key}"] = lines(grid, metric)
    for metric in grid.metrics:
        found[f"map {metric.key}"] = heat_map(grid, metric)
    found[PARETO_TITLE] = pareto_front(grid)
    found["parallel coordinates"] = parallel(grid)
    return {name: figure for name, figure in found.items() if figure is not None}


def rows(grid: Grid, *, num_metrics: int | None = None) -> list[list[str]]:
    """Returns a heading and one row per configuration, in the sweep's order, with intervals of the means."""
    metrics = grid.metrics[:num_metrics]
    heading = [*(axis.key for axis in grid.axes), *(titled(metric) for metric in metrics)]
    if not grid.axes:
        heading.insert(0, "")
    return [heading, *([*_labels(grid, cell), *(_at(grid, cell, m) for m in metrics)] for cell in grid.cells)]


def print_found(grid: Grid, console: Console) -> None:
    """Prints the caveats and the table."""
    for caveat in grid.caveats:
        console.print(Text(f"  {caveat}", style="yellow"), soft_wrap=True)
    for num_metrics in range(PRINTED_METRICS, 0, -1):
        heading, *body = rows(grid, num_metrics=num_metrics)
        printed = plain_table([heading, *body[:PRINTED_ROWS]], range(max(1, len(grid.axes))))
        if fits(printed, console):
            break
    console.print(printed)
    others = [one for one in PARETO if one.key not in {metric.key for metric in grid.metrics[:num_metrics]}]
    if others and all(one.key in cell for cell in grid.cells.values() for one in others):
        heading, *lines = rows(replace(grid, metrics=tuple(others)), num_metrics=len(others))
        console.print(plain_table([heading, *lines[:PRINTED_ROWS]], range(max(1, len(grid.axes)))))
    if len(body) > PRINTED_ROWS:
        console.print(Text(f"  {plural(len(body) - PRINTED_ROWS, 'more row')} in runs.parquet and {PAGE}"))


def page_of(grid: Grid, folder: SweepFolder) -> Page:
    """Returns the page of a sweep."""
    figures = drawings(grid)
    seeds = f"{grid.num_seeds} seeds, bands are {LEVEL}s of the mean" if grid.num_seeds > 1 else "one seed"
    axes = ", ".join(f"{axis.key} ({len(axis.values)})" for axis in grid.axes) or "the seed only"
    sections: dict[str, Content] = {"Notes": listed(grid.caveats)} if grid.caveats else {}
    for metric in grid.metrics:
        of_metric = [
            figures[f"{kind} {metric.key}"] for kind in ("lines", "map") if f"{kind} {metric.key}" in figures
        ]
        if of_metric:
            sections[titled(metric)] = of_metric
    if PARETO_TITLE in figures:
        caption = "<p>One point per configuration. The line joins those that no other one beats in both.</p>"
        sections["Throughput of a GPU against speed for a user"] = [caption, figures[PARETO_TITLE]]
    if "parallel coordinates" in figures:
        caption = (
            "<p>One line per configuration (mean over its seeds). Drag along an axis to select lines.</p>"
        )
        sections["Parallel coordinates"] = [caption, figures["parallel coordinates"]]
    sections["All configurations"] = table(rows(grid)[: PAGE_ROWS + 1])
    failures = [row for row in folder.rows.values() if row["status"] != DONE]
    if failures:
        failure_rows = [[str(row["run"]), row["status"], row["error"]] for row in failures[:PAGE_ROWS]]
        sections["Failed and invalid runs"] = table([["run", "status", "reason"], *failure_rows])
    sections["The sweep"] = settings_text("Settings of the sweep", _about(folder))
    return Page(
        "Sweep",
        f"{folder.num_of(DONE):,} of {plural(folder.plan.num_points, 'run')} over {axes}; {seeds}.",
        sections,
    )


def _about(folder: SweepFolder) -> dict[str, Any]:
    return {key: folder.about[key] for key in ("begun", "code", "overrides")}


def _caveats(folder: SweepFolder) -> list[str]:
    left = folder.plan.num_points - len(folder.rows)
    found = [f"{left:,} of {folder.plan.num_points:,} runs are not done yet."] if left else []
    for status, what in ((FAILED, "failed"), (REFUSED, "have invalid settings")):
        if count := folder.num_of(status):
            found.append(f"{count:,} of {folder.plan.num_points:,} runs {what} and are not shown.")
    codes = {row["code"] for row in folder.rows.values() if row["status"] == DONE and row["code"]}
    if len(codes) > 1:
        found.append(
            f"The runs come from {len(codes)} versions of the code or the configs; see the column code."
        )
    return found


def _labels(grid: Grid, cell: Cell) -> list[str]:
    return [axis.label(value) for axis, value in zip(grid.axes, cell, strict=True)] or ["all seeds"]


def _at(grid: Grid, cell: Cell, metric: Metric) -> str:
    return with_interval(grid.cells[cell][metric.key], unit_of(metric)[0])
