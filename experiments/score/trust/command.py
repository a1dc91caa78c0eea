"""Writes the table of expected errors: simulates, fits without each group, and predicts what was left out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from experiments.app.run_folder import file_errors_reported, print_path
from experiments.app.terminal import print_tables, terminal_console
from experiments.score.prediction_file import PredictionFile
from experiments.score.trust.bands import FAMILY, FEW
from experiments.score.trust.cases import SOURCES, Case, read_cases
from experiments.score.trust.left_out import (
    Fitted,
    Outcome,
    Rows,
    cell_of,
    expected_errors,
    left_out_tasks,
    num_rows,
    outcomes,
    ratios,
    repeated_tasks,
    rows_of,
    slope_tasks,
    to_fit,
    tree_of,
)
from experiments.score.trust.predictions import Predictions, Task, columns
from experiments.study.errors import errors
from experiments.study.progress import lasting_progress
from hwmodels import trust
from sim.engine.clock import ctrl_c_noted
from sim.report.files import write_whole
from sim.report.wording import plural
from sim.settings.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class TrustJob:
    """The rows of all tables of a folder, and the table to write."""

    cases: Sequence[Case]
    predictions: Predictions
    path: Path
    """File of the table."""

    def run(self, folder: Path) -> None:
        """Simulates what the file of predictions lacks, and prints and writes the expected errors."""
        console, file = terminal_console(), self.predictions.file
        file.begin()
        chosen = to_fit(self.cases)
        try:
            self._simulate(slope_tasks(chosen), "slopes", console)
            rows = rows_of(chosen, self.predictions)
            runs = list(left_out_tasks(self.cases, rows))
            self._simulate([task for task, _ in runs], "rows left out", console)
            runs = [*runs, *repeated_tasks(runs, self.predictions)]
            self._simulate([task for task, _ in runs], "rows at a limit, with other seeds", console)
        except KeyboardInterrupt:
            file.close()
            text = f"{len(file.rows):,} predictions are kept; continue with the same settings and resume=true"
            console.print(text, highlight=False, soft_wrap=True)
            print_path(str(file.path), console)
            raise
        found = list(outcomes(runs, self.predictions))
        print_outcome(found, rows, console)
        with file_errors_reported(file.path, "choose another file with out="):
            file.finish(list(file.rows))
        with file_errors_reported(self.path, "choose another file with trust_table="):
            write_whole(self.path, trust.written(expected_errors(found)))
        print_path(str(self.path), console)

    def _simulate(self, tasks: Sequence[Task], what: str, console: Console) -> None:
        missing = self.predictions.missing(tasks)
        console.print(f"{what}: {plural(len(missing), 'simulation')}", highlight=False)
        progress = lasting_progress(console, len(missing), 0, enabled=True, failure="refused")
        with ctrl_c_noted() as interrupt, progress as report:
            self.predictions.run(tasks, interrupt, report)


def prepare_trust(
    *,
    measured: Path,
    where: str | None,
    out: Path,
    jobs: int | None,
    resume: bool,
    version: str,
    path: Path | None,
) -> TrustJob:
    """Builds the job. version: of the code that predicts. path: of the table; None: the project's own.

    Raises ConfigError for wrong tables, and where the rows are of fewer than two groups.
    """
    cases = read_cases(measured, where)
    groups = {case.group for case in cases if case.table == "silicon"}
    if len(groups) < 2 or len({case.gpu for case in cases}) < 2:
        raise ConfigError(
            f"update_trust=true, where={where}: closed-loop rows are of {plural(len(groups), 'group')} of a "
            "model and a GPU: must be of two or more, on two or more GPUs; select more rows"
        )
    file = PredictionFile(
        path=out,
        columns=columns(),
        settings={
            "measured": str(measured.resolve()),
            "where": str(where),
            "version of windtunnel": version,
        },
    )
    if resume:
        file.resume()
    return TrustJob(cases=cases, predictions=Predictions(file=file, jobs=jobs), path=path or trust.PATH)


def print_outcome(found: Sequence[Outcome], rows: Rows, console: Console) -> None:
    """Prints the errors of left-out rows over all engines and GPUs, and the constants fitted to all rows."""
    console.print("Absolute percentage errors of rows that were left out of the fit (median / p90, bias)")
    print_tables([error_lines(found)], console)
    console.print(
        "Percentage within the bands (median / p90) of all other groups: of all rows, mean of the groups"
    )
    print_tables([coverage_lines(found)], console)
    console.print("Constants fitted to all rows, and those of the engine profiles and calibrations")
    print_tables([constant_lines(rows.fit(lambda case: False), rows.cases)], console)


def error_lines(left_out: Iterable[Outcome]) -> list[list[str]]:
    """Returns the errors of left-out rows by traffic, level, architecture and figure; the heading first.

    Public rows are not among them: `kind=public` prints their errors.
    """
    cells: dict[tuple[str, ...], list[Outcome]] = defaultdict(list)
    for one in left_out:
        if SOURCES[one.case.table].fitted:
            cells[one.case.traffic, one.level.value, one.case.architecture, one.figure].append(one)
    lines = [["traffic", "GPU", "architecture", "figure", "rows", "median", "p90", "bias"]]
    for key, own in sorted(cells.items()):
        of_100 = [100 + one.error_percent for one in own]  # predictions of measured values of 100
        found = errors(of_100, [100.0] * len(own))
        figures = (f"{found.median:.1f}", f"{found.p90:.1f}", f"{found.bias:+.1f}")
        lines.append([*key, f"{num_rows(own):,}", *figures])
    return lines


def coverage_lines(found: Sequence[Outcome]) -> list[list[str]]:
    """Returns the coverage of left-out groups by traffic, figure, level, kind of model and engine.

    Only cells of at least `FEW` groups have a line. The rows for testing are compared with the bands of all
    others. The heading is first.
    """
    together = [*found, *ratios(found)]
    tree = tree_of(together)
    tests: dict[tuple[str, ...], list[tuple[bool, bool]]] = defaultdict(list)
    for one in together:
        band = tree.band(cell_of(one)) if one.case.is_for_testing else None
        if band is not None:
            error = abs(one.error_percent)
            for depth in (FAMILY, FAMILY + 1):
                tests[cell_of(one)[:depth]].append((error <= band.median_percent, error <= band.p90_percent))
    lines = [
        ["traffic", "figure", "GPU", "models", "engine", "groups", "rows", "by row", "by group", "tests"]
    ]
    for cell in sorted(tree.cells):
        if not FAMILY <= len(cell) <= FAMILY + 1 or tree.groups(cell) < FEW:
            continue
        inside = tree.coverage(cell)
        if inside is None:
            continue
        own = np.array(tests[cell])
        tested = f"{_shares(own.mean(axis=0))} of {len(own)}" if len(own) else ""
        counts = [f"{inside.groups:,}", f"{inside.rows:,}"]
        _, level, figure, models, engine = (*cell, trust.ALL_ENGINES)[:5]
        shares = [_shares(inside.of_rows), _shares(inside.of_groups), tested]
        lines.append([*figure.split("/"), level, models, engine, *counts, *shares])
    return lines


def _shares(pair: Sequence[float]) -> str:
    return " / ".join(f"{100 * share:.0f}" for share in pair)


def constant_lines(fitted: Fitted, cases: Iterable[Case]) -> list[list[str]]:
    """Returns the fitted constants beside those in the config files; the heading first."""
    own: dict[tuple[str, str], float] = {}
    for case in cases:
        for name, value in case.values.items():
            own[case.profile, name] = own[case.gpu, name] = value
    return [
        ["profile or GPU", "constant", "fitted", "own"],
        *(
            [owner, name, f"{value:.3g}", f"{own[owner, name]:.3g}"]
            for (owner, name), value in fitted.items()
        ),
    ]
