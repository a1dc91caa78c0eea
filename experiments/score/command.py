"""`windtunnel score`: simulates every row of a table of measurements and reports the errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import track

from experiments.app.output_file import check_output_file, file_errors_reported
from experiments.app.run_folder import print_path
from experiments.score import per_request, runs, silicon
from experiments.score.physical import impossible_rows
from experiments.score.report import concurrency_band, errors_by_group, print_errors
from experiments.score.table import read_table
from experiments.study import measured_requests
from experiments.study.presets import NotSimulatedError
from hwmodels.levels.rooflines import Calibrated, LatencyLevel
from sim.report.whole_file import write_whole
from sim.report.wording import plural
from sim.settings.build import build_as
from sim.settings.compose import Composition
from sim.settings.errors import ConfigError, suggest
from sim.setup.scenario import Scenario


class Kind(NamedTuple):
    """One kind of table of measurements."""

    columns: tuple[str, ...]
    positive: tuple[str, ...]
    metrics: tuple[str, ...]
    """Predicted metrics, in the order of the output."""
    groups: tuple[str, ...]
    scenario_of: Callable[[dict[str, Any], LatencyLevel], Scenario]
    predict: Callable[[dict[str, Any], LatencyLevel], dict[str, float]]
    rows: Callable[[pd.DataFrame, Path], pd.DataFrame] | None = None
    """Turns the table and its path into one row per prediction; None: the table has that form."""


KINDS = {
    "silicon": Kind(
        silicon.COLUMNS,
        silicon.POSITIVE,
        ("ttft_ms", "tpot_ms", "e2e_ms", "output_tokens_per_s_per_gpu"),
        ("arch", "model", "gpu", "backend", "weights", "concurrency_band"),
        silicon.scenario_of,
        silicon.predict,
    ),
    "experiments": Kind(
        runs.COLUMNS,
        runs.POSITIVE,
        runs.METRICS,
        ("set", "model", "gpu", "workload"),
        runs.scenario_of,
        runs.predict,
    ),
    "requests": Kind(
        per_request.COLUMNS,
        per_request.POSITIVE,
        per_request.METRICS,
        ("run",),
        measured_requests.scenario_of,
        per_request.predict,
        per_request.by_run,
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreSettings:
    """Settings of `windtunnel score`."""

    measured: str
    out: str
    kind: str = "silicon"
    latency: LatencyLevel = field(default_factory=Calibrated)
    jobs: int | None = None
    """Worker processes; None: one per core."""
    where: str | None = None
    """Condition on the rows to predict, in the syntax of pandas.DataFrame.query; None: all rows."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind}: no such kind of table; {suggest(self.kind, KINDS)}")
        if self.jobs is not None and self.jobs < 1:
            raise ValueError(f"jobs={self.jobs}: must be >= 1, or null for one per core")
        check_output_file("out", self.out)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreJob:
    """Rows to predict."""

    settings: ScoreSettings
    table: pd.DataFrame
    impossible: dict[Any, str]
    """Reasons why the measurements of some rows are impossible, by id."""

    def run(self, folder: Path) -> None:
        """Predicts all rows, and prints and writes the results."""
        settings, table, console = self.settings, self.table, Console()
        kind = KINDS[settings.kind]
        columns = ["id", *kind.metrics, "status"]
        predicted = pd.DataFrame(list(_predictions(settings, table, console))).reindex(columns=columns)
        renamed = predicted.rename(columns={metric: f"{metric}_predicted" for metric in kind.metrics})
        scored = table.merge(renamed.drop(columns="status"), on="id")
        if "concurrency" in scored:
            scored["concurrency_band"] = scored["concurrency"].map(concurrency_band)
        credible = scored[~scored["id"].isin(list(self.impossible))]
        print_errors(errors_by_group(credible, kind.metrics, kind.groups), console)
        is_predicted = predicted["status"] == "ok"
        console.print(f"{is_predicted.sum():,} of {plural(len(predicted), 'row')} predicted")
        for reason, count in predicted.loc[~is_predicted, "status"].value_counts().items():
            console.print(f"  {plural(count, 'row')} not predicted: {reason}", highlight=False)
        for row_id, reason in self.impossible.items():
            text = f"  excluded from the errors: id={row_id}: {reason}"
            console.print(text, highlight=False, soft_wrap=True)
        for line in not_measured(settings, table[table["id"].isin(predicted.loc[is_predicted, "id"])]):
            console.print(line, highlight=False, soft_wrap=True)
        with file_errors_reported(Path(settings.out), "choose another file with out="):
            write_whole(Path(settings.out), predicted.to_csv(index=False))
        print_path(settings.out, console)


def prepare(cfg: DictConfig, composition: Composition) -> ScoreJob:
    """Builds the job. Raises ConfigError for wrong settings or tables."""
    settings: ScoreSettings = build_as(ScoreSettings, cfg, "")
    table, impossible = _read(settings)
    return ScoreJob(settings=settings, table=table, impossible=impossible)


def _read(settings: ScoreSettings) -> tuple[pd.DataFrame, dict[Any, str]]:
    """Returns the rows to predict, and by id the reasons why some measurements are impossible."""
    kind, path = KINDS[settings.kind], Path(settings.measured)
    table = read_table(path, kind.columns, kind.positive)
    if settings.where is not None:
        try:
            table = table.query(settings.where)
        except Exception as error:  # the expression may raise any exception
            raise ConfigError(f"where={settings.where}: {error}") from error
        if table.empty:
            raise ConfigError(f"where={settings.where}: no row of the table matches")
    rows = table if kind.rows is None else kind.rows(table, path)
    return rows, impossible_rows(
        path, rows, kind.metrics, lambda row: kind.scenario_of(row, settings.latency)
    )


def not_measured(settings: ScoreSettings, predicted: pd.DataFrame) -> list[str]:
    """Returns a sentence per GPU of the rows for which prices were not measured on that GPU."""
    lines: dict[str, None] = {}
    for _, row in predicted.drop_duplicates("gpu").iterrows():
        replica = KINDS[settings.kind].scenario_of(dict(row), settings.latency).replica
        if replica.calibration.measured_on != replica.device.name:
            lines[settings.latency.basis(replica)] = None
    return list(lines)


def _predictions(settings: ScoreSettings, table: pd.DataFrame, console: Console) -> Iterator[dict[str, Any]]:
    """Yields one prediction per row, in the order of the table."""
    rows = table.to_dict("records")
    one = partial(predict_row, settings.kind, settings.latency)
    jobs = min(settings.jobs or os.cpu_count() or 1, len(rows))
    if jobs == 1:
        yield from track(map(one, rows), total=len(rows), console=console, description=settings.kind)
        return
    pool = ProcessPoolExecutor(jobs)
    try:
        results = pool.map(one, rows, chunksize=8)
        yield from track(results, total=len(rows), console=console, description=settings.kind)
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C the rows that wait are not predicted


def predict_row(kind: str, latency: LatencyLevel, row: dict[str, Any]) -> dict[str, Any]:
    """Returns the row's id with its predictions and status ok, or with the reason as its status."""
    try:
        return {"id": row["id"], **KINDS[kind].predict(row, latency), "status": "ok"}
    except (NotSimulatedError, ValueError) as error:
        return {"id": row["id"], "status": str(error)}
