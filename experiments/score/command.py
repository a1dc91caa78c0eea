"""`windtunnel score`: simulates every row of a table of measurements and reports the errors."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from rich.console import Console

from experiments.app.run_folder import (
    check_distinct_files,
    check_output_file,
    file_errors_reported,
    print_path,
)
from experiments.app.settings.compose import Composition
from experiments.app.terminal import terminal_console
from experiments.score.kinds import KINDS
from experiments.score.league import rows as league
from experiments.score.league.command import LeagueJob, prepare_league
from experiments.score.physical import impossible_rows
from experiments.score.prediction_file import PredictionFile
from experiments.score.predictions import predictions
from experiments.score.report import concurrency_band, errors_by_group, print_errors
from experiments.score.table import chosen_rows, read_table
from experiments.score.trust.command import TrustJob, prepare_trust
from experiments.study.code import code_version
from experiments.study.presets import taken_for
from experiments.study.progress import lasting_progress
from fieldlimits import Checked, OneOf, PositiveInt, check
from hwmodels.levels import Calibrated, LatencyLevel
from sim.engine.clock import ctrl_c_noted
from sim.report.wording import plural
from sim.settings.build import build_as
from sim.settings.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreSettings(Checked):
    """Settings of `windtunnel score`."""

    measured: str
    out: str
    kind: Annotated[str, OneOf(KINDS)] = "silicon"
    latency: LatencyLevel = field(default_factory=Calibrated)
    jobs: Annotated[PositiveInt | None, "null for one per core"] = None
    """Worker processes; None: one per core."""
    where: str | None = None
    """Condition on the rows to predict, in the syntax of pandas.DataFrame.query; None: all rows."""
    resume: bool = False
    """Whether to continue the interrupted file `out`, with the same settings."""
    update_trust: bool = False
    """Whether to write the table of expected errors; `measured` is then a folder of tables of all kinds."""
    league: bool = False
    """Whether to print the errors of all simulators on the rows of the league, from kept predictions."""
    trust_table: str | None = None
    """File of that table; None: the project's own."""

    def __post_init__(self) -> None:
        check(self)
        check_output_file("out", self.out)
        if self.trust_table is not None:
            check_output_file("trust_table", self.trust_table)
        check_distinct_files(measured=self.measured, out=self.out, trust_table=self.trust_table)
        if self.update_trust and self.latency != Calibrated():
            raise ValueError("update_trust=true: states errors of latency=calibrated; leave latency= out")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreJob:
    """Rows to predict."""

    settings: ScoreSettings
    table: pd.DataFrame
    impossible: dict[Any, str]
    """Reasons why the measurements of some rows are impossible, by id."""
    file: PredictionFile

    def run(self, folder: Path) -> None:
        """Predicts all rows that the file lacks, writes each as it comes, and prints the errors."""
        console, ids = terminal_console(), self.table["id"].tolist()
        self._predict_missing(console)
        predicted = self.file.table(ids)
        print_scores(self.settings, self.table, self.impossible, predicted, console)
        left = len(ids) - len(predicted)
        if left:
            self.file.close()
            text = f"{plural(left, 'row')} left; continue with the same settings and resume=true"
            console.print(text, highlight=False, soft_wrap=True)
        else:
            with file_errors_reported(Path(self.settings.out), "choose another file with out="):
                self.file.finish(ids)
        print_path(self.settings.out, console)
        if left:
            raise KeyboardInterrupt

    def _predict_missing(self, console: Console) -> None:
        settings, file = self.settings, self.file
        rows: Any = self.table.to_dict("records")
        missing = [row for row in rows if str(row["id"]) not in file.rows]
        refused = sum(row["status"] != "ok" for row in file.rows.values())
        file.begin()
        progress = lasting_progress(
            console, len(rows), len(file.rows), enabled=True, part="row", failure="not predicted"
        )
        with ctrl_c_noted() as interrupt, progress as report:
            for row in predictions(settings.kind, settings.latency, missing, settings.jobs, interrupt):
                file.append(row)
                refused += row["status"] != "ok"
                report(len(file.rows) - refused, refused)


def prepare(cfg: dict[str, Any], composition: Composition) -> ScoreJob | TrustJob | LeagueJob:
    """Builds the job. Raises ConfigError for wrong settings or tables."""
    if cfg["league"] is True:  # its rows are given
        cfg = {**cfg, "measured": str(league.PATH)}
    settings: ScoreSettings = build_as(ScoreSettings, cfg, "")
    if settings.league:
        return prepare_league(settings.where)
    if settings.update_trust:
        return prepare_trust(
            measured=Path(settings.measured),
            where=settings.where,
            out=Path(settings.out),
            jobs=settings.jobs,
            resume=settings.resume,
            version=code_version(composition.source.dirs),
            path=None if settings.trust_table is None else Path(settings.trust_table),
        )
    table, impossible = _read(settings)
    file = PredictionFile(
        path=Path(settings.out),
        columns=("id", *KINDS[settings.kind].metrics, "status"),
        settings={
            "kind": settings.kind,
            "where": str(settings.where),
            "latency": str(settings.latency),
            "content of measured": digest_of(Path(settings.measured), table),
            "version of windtunnel": code_version(composition.source.dirs),
        },
    )
    if settings.resume:
        file.resume()
    return ScoreJob(settings=settings, table=table, impossible=impossible, file=file)


def digest_of(path: Path, table: pd.DataFrame) -> str:
    """Returns 12 hexadecimal digits of the content of a file and of the rows that were read from it."""
    return hashlib.blake2b(path.read_bytes() + table.to_csv().encode(), digest_size=6).hexdigest()


def _read(settings: ScoreSettings) -> tuple[pd.DataFrame, dict[Any, str]]:
    """Returns the rows to predict, and by id the reasons why some measurements are impossible."""
    kind, path = KINDS[settings.kind], Path(settings.measured)
    table = read_table(path, kind.columns, kind.positive)
    if settings.where is not None:
        try:
            table = chosen_rows(table, settings.where)
        except pd.errors.UndefinedVariableError as error:
            raise ConfigError(f"where={settings.where}: {error}") from error
        if table.empty:
            raise ConfigError(f"where={settings.where}: no row of the table matches")
    rows = table if kind.rows is None else kind.rows(table, path)
    return rows, impossible_rows(
        path, rows, kind.metrics, lambda row: kind.scenario_of(row, settings.latency)
    )


def print_scores(
    settings: ScoreSettings,
    table: pd.DataFrame,
    impossible: dict[Any, str],
    predicted: pd.DataFrame,
    console: Console,
) -> None:
    """Prints the errors of the predicted rows by groups, and the reasons for all other rows."""
    kind = KINDS[settings.kind]
    renamed = predicted.rename(columns={metric: f"{metric}_predicted" for metric in kind.metrics})
    scored = table.merge(renamed.drop(columns="status"), on="id")
    if "concurrency" in scored:
        scored["concurrency_band"] = scored["concurrency"].map(concurrency_band)
    credible = scored[~scored["id"].isin(list(impossible))]
    print_errors(errors_by_group(credible, kind.metrics, kind.groups), console)
    is_predicted = predicted["status"] == "ok"
    if kind.unused is not None and (names := kind.unused(table)):
        console.print(f"Columns of runs.csv that are not simulated: {', '.join(names)}", markup=False)
    for name in dict.fromkeys(str(name) for name in table.get("model", ())):
        if line := taken_for(name):
            console.print(line, highlight=False, soft_wrap=True, markup=False)
    console.print(f"{is_predicted.sum():,} of {plural(len(table), 'row')} predicted")
    for reason, count in predicted.loc[~is_predicted, "status"].value_counts().items():
        console.print(f"  {plural(count, 'row')} not predicted: {reason}", highlight=False, markup=False)
    for row_id, reason in impossible.items():
        text = f"  excluded from the errors: id={row_id}: {reason}"
        console.print(text, highlight=False, soft_wrap=True, markup=False)
    for line in not_measured(settings, table[table["id"].isin(predicted.loc[is_predicted, "id"])]):
        console.print(line, highlight=False, soft_wrap=True)


def not_measured(settings: ScoreSettings, predicted: pd.DataFrame) -> list[str]:
    """Returns a sentence per GPU of the rows for which prices were not measured on that GPU."""
    lines: dict[str, None] = {}
    for _, row in predicted.drop_duplicates("gpu").iterrows():
        replica = KINDS[settings.kind].scenario_of(dict(row), settings.latency).replica
        if replica.calibration.measured_on != replica.device.name:
            lines[settings.latency.basis(replica)] = None
    return list(lines)
