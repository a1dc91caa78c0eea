"""The runs of an experiment, in processes that stay: one row a run; Ctrl-C keeps what is done."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd
from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.compare.arms import Point, figures
from experiments.errors import ConfigError
from experiments.simulate import build_run
from hwmodels.iteration import UnknownIterationError
from sim.interrupt import Interrupt, ctrl_c_noted

INTERRUPTED = "interrupted"  # a figure of summary.json: the run was cut short

Report = Callable[[int, int], None]  # runs done, runs in all
Results = Generator[tuple[int, dict[str, Any]], None, None]  # index of the task, its summary


class Task(NamedTuple):
    point: Point
    seed: int

    @property
    def label(self) -> dict[str, Any]:
        return {"arm": self.point.arm, "seed": self.seed, "swept": self.point.swept}


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """What was run."""

    table: pd.DataFrame
    """One row a run: arm, seed, swept, then every figure of its summary.json by dotted key."""
    notes: dict[str, list[str]]
    """Of each arm's first run: what its figures rest on."""
    interrupted: bool


def run_all(points: Sequence[Point], seeds: Sequence[int], jobs: int, report: Report) -> Runs:
    """Every point with every seed, all points of a seed first: an interrupted experiment still has pairs."""
    tasks = [Task(point, seed) for seed in seeds for point in points]
    rows: dict[int, dict[str, Any]] = {}
    notes: dict[str, list[str]] = {}
    interrupted = False
    with ctrl_c_noted() as interrupt:
        in_turn = _here(tasks, interrupt) if jobs == 1 else _in_processes(tasks, jobs, interrupt)
        for index, summary in in_turn:
            row = figures(summary)
            if row.pop(INTERRUPTED):
                interrupted = True
                break
            rows[index] = {**tasks[index].label, **row}
            notes.setdefault(tasks[index].point.arm, summary["notes"])
            report(len(rows), len(tasks))
        in_turn.close()
        interrupted = interrupted or (interrupt.noted and len(rows) < len(tasks))
    columns = ["arm", "seed", "swept"]
    table = pd.DataFrame([rows[index] for index in sorted(rows)], columns=None if rows else columns)
    return Runs(table=table, notes=notes, interrupted=interrupted)


def fly(config: dict[str, Any]) -> dict[str, Any]:
    """The summary of one run. Raises ConfigError if the latency level cannot price an iteration."""
    scenario, source, _ = build_run(OmegaConf.create(config))
    try:
        return scenario.run(source).summary
    except UnknownIterationError as error:
        raise ConfigError(f"latency: {error}") from error


def _here(tasks: Sequence[Task], interrupt: Interrupt) -> Results:
    for index, task in enumerate(tasks):
        if interrupt.noted:
            return
        with _named(task):
            summary = fly(task.point.with_seed(task.seed))
        yield index, summary


def _in_processes(tasks: Sequence[Task], jobs: int, interrupt: Interrupt) -> Results:
    """A process is handed one task at a time: at Ctrl-C nothing is queued that would still run."""
    waiting = deque(enumerate(tasks))
    running: dict[Future[dict[str, Any]], int] = {}
    with ProcessPoolExecutor(jobs, initializer=_leave_ctrl_c_to_the_parent) as pool:
        while running or (waiting and not interrupt.noted):
            while waiting and len(running) < jobs and not interrupt.noted:
                index, task = waiting.popleft()
                running[pool.submit(fly, task.point.with_seed(task.seed))] = index
            done, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in done:
                index = running.pop(future)
                with _named(tasks[index]):
                    summary = future.result()
                yield index, summary


@contextmanager
def _named(task: Task) -> Iterator[None]:
    """What a run raises about its settings, with the run's name."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"arm {task.point.arm}, seed {task.seed}: {error}") from error
    except BrokenProcessPool as error:
        raise ConfigError(
            f"arm {task.point.arm}, seed {task.seed}: its process ended abruptly, perhaps for lack of memory"
            "; try fewer jobs"
        ) from error


def _leave_ctrl_c_to_the_parent() -> None:
    """In a worker. While it simulates, `Simulation.run` notes Ctrl-C and ends the run early."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def progress_of(console: Console, *, enabled: bool) -> Iterator[Report]:
    """A bar on a terminal; elsewhere nothing."""
    if not (enabled and console.is_terminal):
        yield lambda done, total: None
        return
    columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)
