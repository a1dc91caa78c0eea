"""Runs a sweep and keeps every run as it finishes, whatever ends the sweep."""

from __future__ import annotations

import importlib
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.text import Text

from experiments.app.job import CannotWriteError, UnsuccessfulError
from experiments.app.run_folder import print_folder, seen_from_here
from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.override import quoted
from experiments.app.terminal import terminal_console
from experiments.study import workers
from experiments.study.launchers.outcome import CannotLaunchError, Outcome
from experiments.study.progress import Report, lasting_progress
from experiments.study.study import Findings, StudyJob
from experiments.sweep.folder import DONE, FAILED, REFUSED, SweepFolder
from experiments.sweep.plan import Point
from experiments.sweep.run_task import FinishedRun, RunTask, in_words, tasks_of
from experiments.sweep.setup import SweepOptions, begun
from policies.user_code import trace_of
from sim.engine.clock import Interrupt, ctrl_c_noted
from sim.report.wording import plural
from sim.settings.errors import ConfigError


def run_sweep(folder: SweepFolder, sweep_options: SweepOptions, source: ConfigSource) -> None:
    """Runs the missing points, keeps each run as it finishes, and draws the sweep.

    Raises ConfigError, UnsuccessfulError if runs failed, and KeyboardInterrupt if runs are left.
    """
    console = terminal_console()
    points = folder.missing()
    already = folder.num_of(DONE)
    if already or len(folder.about["code"]) > 1:
        print_resumed(folder, already, len(points), console)
    begun = time.monotonic()
    total = folder.plan.num_points
    progress = lasting_progress(console, total, already, enabled=sweep_options.sweep.progress)
    shown = seen_from_here(folder.path)
    with ctrl_c_noted() as interrupt, progress as report:
        try:
            collect(folder, sweep_options, source, interrupt, report)
        except CannotLaunchError as error:
            here = f"{folder.resume_command(shown)} launcher=local"
            raise ConfigError(f"{error}; to run on this machine: {here}") from error
    seconds = time.monotonic() - begun
    folder.write_runs()
    print_done(folder, folder.num_of(DONE) - already, seconds, console)
    _finish(folder, sweep_options, interrupt, console)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweeping:
    """A sweep as a study of the Python interface, whose runs are in a folder only while they are made."""

    source: ConfigSource
    overrides: Sequence[str]

    def find(self, report: workers.Report) -> Findings | None:
        """Makes all runs; see `Study`."""
        with TemporaryDirectory() as place:
            own = f"hydra.run.dir={quoted(str(Path(place, 'sweep')))}"
            source, folder, options = begun(self.source, [*self.overrides, own])
            total = folder.plan.num_points

            def ended(done: int, failed: int) -> None:
                report(done + failed, total)

            try:
                with ctrl_c_noted() as interrupt:
                    collect(folder, options, source, interrupt, ended)
                if not folder.rows:
                    return None
                page = importlib.import_module("experiments.sweep.page")  # imports plotly, so only now
                found: Findings = page.findings_of(folder, options.report, is_whole=len(folder.rows) == total)
                return found
            finally:
                folder.release()


def sweep_of(source: ConfigSource, overrides: Sequence[str]) -> StudyJob:
    """Returns the job of a sweep. Its settings are checked when it begins."""
    return StudyJob(study=Sweeping(source=source, overrides=overrides))


def _finish(folder: SweepFolder, sweep_options: SweepOptions, interrupt: Interrupt, console: Console) -> None:
    """Draws the finished runs, and prints how to continue with the rest."""
    shown, num_left = seen_from_here(folder.path), folder.plan.num_points - len(folder.rows)
    not_drawn: Exception | None = None
    if folder.num_of(DONE):
        try:
            _draw(folder, sweep_options, console)
        except ConfigError as error:
            not_drawn = ConfigError(
                f"{error}; the runs are kept; to draw them: windtunnel report sweep={shown}"
            )
        except OSError as error:
            not_drawn = CannotWriteError(
                f"{error.filename}: {error.strerror}; the runs are kept; make room, then: windtunnel report "
                f"sweep={shown}"
            )
    if num_left:
        print_remaining(num_left, folder.resume_command(shown), console)
    print_folder(folder.path, console)
    if not_drawn is not None:
        raise not_drawn
    if interrupt.noted or num_left:
        raise KeyboardInterrupt
    if folder.num_of(FAILED):
        raise UnsuccessfulError


def collect(
    folder: SweepFolder,
    sweep_options: SweepOptions,
    source: ConfigSource,
    interrupt: Interrupt,
    report: Report,
) -> None:
    """Runs the missing points, and keeps results as they arrive.

    It ends when all runs are done, Ctrl-C is pressed or the disk is full. report: called with the numbers of
    runs that are done, and that failed or were refused.
    """
    points, code = folder.missing(), sweep_options.code
    tasks = tasks_of(
        points,
        source,
        sweep_options.import_dirs,
        tables=sweep_options.sweep.tables,
        recorded=sweep_options.recorded,
    )
    for point in points:  # failed points run again
        folder.rows.pop(point.index, None)
    outcomes = sweep_options.launcher.outcomes(RunTask.run, tasks, interrupt)
    try:
        for outcome in outcomes:
            _keep(folder, points[outcome.index], outcome, code)
            folder.write_runs(now=False)
            report(folder.num_of(DONE), len(folder.rows) - folder.num_of(DONE))
    finally:
        outcomes.close()
        # The table gets the finished runs, whatever ends the sweep. On a full disk the previous table stays,
        # and the folders hold all runs.
        with suppress(CannotWriteError):
            folder.write_runs()


def _keep(folder: SweepFolder, point: Point, outcome: Outcome[FinishedRun], code: str) -> None:
    error = outcome.error
    if error is None:
        assert outcome.result is not None
        folder.keep(point, outcome.result, code)
        return
    status = REFUSED if type(error) is ConfigError else FAILED
    trace = trace_of(error)
    if not (trace or isinstance(error, ConfigError)):
        trace = "".join(traceback.format_exception(error))
    folder.note_failure(point, status, in_words(error), trace, code)


def _draw(folder: SweepFolder, sweep_options: SweepOptions, console: Console) -> None:
    redrawn = importlib.import_module("experiments.sweep.page")  # imports plotly, so only now
    found = redrawn.of_folder(folder, sweep_options.report)
    redrawn.print_found(found, console)
    if sweep_options.sweep.report:
        redrawn.write(found, folder, sweep_options.report)


def print_resumed(folder: SweepFolder, already: int, missing: int, console: Console) -> None:
    """Prints how many runs are done and how many are missing when a sweep is resumed."""
    console.print(Text(f"{plural(already, 'run')} done; {missing:,} missing or failed."))
    if len(folder.about["code"]) > 1:
        console.print(
            Text(
                "  The code or a config has changed since then; see the column code of runs.parquet.",
                style="yellow",
            )
        )


def print_done(folder: SweepFolder, num_new: int, seconds: float, console: Console) -> None:
    """Prints the number of runs by status, the runs per second, and up to five error messages."""
    total, rate = folder.plan.num_points, num_new / seconds if seconds > 0 else 0.0
    parts = [f"{folder.num_of(DONE):,} of {plural(total, 'run')} done"]
    parts += [f"{count:,} {status}" for status in (FAILED, REFUSED) if (count := folder.num_of(status))]
    new = f"; {num_new:,} simulated in {seconds:.1f} s ({rate:.1f} runs/s)" if num_new else ""
    console.print(Text(f"{', '.join(parts)}{new}", style="bold"))
    messages: dict[str, list[dict[str, Any]]] = {}
    for row in folder.rows.values():
        if row["status"] != DONE:
            messages.setdefault(f"{row['status']}: {row['error']}", []).append(row)
    for message, rows in list(messages.items())[:5]:
        where = ", ".join(str(row["run"]) for row in rows[:5]) + (", ..." if len(rows) > 5 else "")
        console.print(Text(f"  {message} (run {where})", style="yellow"), soft_wrap=True)
    if len(messages) > 5:
        console.print(
            Text(f"  {plural(len(messages) - 5, 'more reason')} in the column error of runs.parquet")
        )


def print_remaining(count: int, command: str, console: Console) -> None:
    """Prints the command that continues with the missing runs."""
    console.print(
        f"{plural(count, 'run')} left; to continue: {command}",
        style="yellow",
        soft_wrap=True,
        highlight=False,
    )
