"""Running a sweep: every run is kept as it comes, whatever ends the sweep."""

from __future__ import annotations

import importlib
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rich.console import Console

from experiments.app.job import UnsuccessfulError
from experiments.app.run_folder import print_folder, seen_from_here
from experiments.app.terminal import terminal_console
from experiments.study.launchers.outcome import CannotLaunchError, Launcher, Outcome
from experiments.sweep.folder import DONE, FAILED, REFUSED, SweepFolder
from experiments.sweep.messages import print_done, print_remaining, print_resumed
from experiments.sweep.plan import Point
from experiments.sweep.progress import sweep_progress
from experiments.sweep.run_task import FinishedRun, RunTask, in_words, tasks_of
from experiments.sweep.setup import How
from sim.engine.interrupt import Interrupt, ctrl_c_noted
from sim.settings.compose import ConfigSource
from sim.settings.errors import ConfigError


def run_sweep(folder: SweepFolder, how: How, source: ConfigSource) -> None:
    """Run what is missing, keep it as it comes, and draw the whole.

    Raises ConfigError, UnsuccessfulError if runs failed, and KeyboardInterrupt if runs are left.
    """
    console = terminal_console()
    points = folder.missing()
    tasks = tasks_of(points, source, how.import_dirs, tables=how.sweep.tables, recorded=how.recorded)
    already = folder.num_of(DONE)
    if already or len(folder.about["code"]) > 1:
        print_resumed(folder, already, len(points), console)
    for point in points:  # what had failed is run anew
        folder.rows.pop(point.index, None)
    begun = time.monotonic()
    total = folder.plan.num_points
    progress = sweep_progress(console, total, already, enabled=how.sweep.progress)
    shown = seen_from_here(folder.path)
    with ctrl_c_noted() as interrupt, progress as report:
        try:
            collect(folder, how.launcher, tasks, points, interrupt, how.code, report)
        except CannotLaunchError as error:
            here = f"{folder.resume_command(shown)} launcher=local"
            raise ConfigError(f"{error}; on this machine instead: {here}") from error
    seconds = time.monotonic() - begun
    folder.write_runs()
    print_done(folder, folder.num_of(DONE) - already, seconds, console)
    _finish(folder, how, interrupt, console)


def _finish(folder: SweepFolder, how: How, interrupt: Interrupt, console: Console) -> None:
    """Draw what is done, and say what is left."""
    shown, num_left = seen_from_here(folder.path), folder.plan.num_points - len(folder.rows)
    not_drawn = None
    if folder.num_of(DONE):
        try:
            _draw(folder, how, console)
        except ConfigError as error:
            not_drawn = ConfigError(f"{error}; the runs are kept, draw them: windtunnel report sweep={shown}")
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
    launcher: Launcher,
    tasks: Sequence[RunTask],
    points: Sequence[Point],
    interrupt: Interrupt,
    code: str,
    report: Any,
) -> None:
    """Keep what comes back, until all is done, Ctrl-C is pressed, or nothing more can be written."""
    outcomes = launcher.outcomes(RunTask.run, tasks, interrupt)
    try:
        for outcome in outcomes:
            if outcome.result is not None and outcome.result.interrupted:
                interrupt.noted = True  # a simulation itself notes Ctrl-C, and what it has is no result
                continue
            _keep(folder, points[outcome.index], outcome, code)
            folder.write_runs(now=False)
            report(folder.num_of(DONE), len(folder.rows) - folder.num_of(DONE))
    finally:
        outcomes.close()
        # What is done is in the table, whatever ends the sweep; on a full disk the one before it stays, and
        # the folders have all.
        with suppress(ConfigError):
            folder.write_runs()


def _keep(folder: SweepFolder, point: Point, outcome: Outcome[FinishedRun], code: str) -> None:
    error = outcome.error
    if error is None:
        assert outcome.result is not None
        folder.keep(point, outcome.result, code)
        return
    status = REFUSED if type(error) is ConfigError else FAILED
    trace = "" if isinstance(error, ConfigError) else "".join(traceback.format_exception(error))
    folder.note_failure(point, status, in_words(error), trace, code)


def _draw(folder: SweepFolder, how: How, console: Console) -> None:
    redrawn = importlib.import_module("experiments.sweep.page")  # plotly: only now
    found = redrawn.of_folder(folder, how.report)
    redrawn.print_found(found, console)
    if how.sweep.report:
        redrawn.write(found, folder, how.report)
