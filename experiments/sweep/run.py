"""Runs a sweep and keeps every run as it finishes, whatever ends the sweep."""

from __future__ import annotations

import importlib
import time
import traceback
from contextlib import suppress

from rich.console import Console

from experiments.app.job import CannotWriteError, UnsuccessfulError
from experiments.app.run_folder import print_folder, seen_from_here
from experiments.app.settings.compose import ConfigSource
from experiments.app.terminal import terminal_console
from experiments.study.launchers.outcome import CannotLaunchError, CutShortError, Outcome
from experiments.study.progress import Report, lasting_progress
from experiments.sweep.folder import DONE, FAILED, REFUSED, SweepFolder
from experiments.sweep.messages import print_done, print_remaining, print_resumed
from experiments.sweep.plan import Point
from experiments.sweep.run_task import FinishedRun, RunTask, in_words, tasks_of
from experiments.sweep.setup import SweepOptions
from policies.user_code.failure import trace_of
from sim.engine.interpreter import Interrupt, ctrl_c_noted
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
            if isinstance(outcome.error, CutShortError):  # on another machine; a partial run is no result
                interrupt.noted = True
                continue
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
