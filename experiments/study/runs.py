"""Runs a study of arms and seeds, with one row per run; Ctrl-C keeps the finished runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import pandas as pd

from experiments.app.settings.compose import resolved
from experiments.study.figures import as_text, figures, leaves
from experiments.study.launchers.launcher import Launcher
from experiments.study.seeds import distinct_seeds
from experiments.study.trace_runs import TraceRun
from experiments.study.workers import Report, in_turn, simulate_config
from sim.engine.clock import ctrl_c_noted
from sim.metrics.result import RunResult
from sim.settings.scenario import build_scenario
from sim.setup.scenario import Scenario

INTERRUPTED = "interrupted"  # figure of summary.json, which is false for every run of a study


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """An arm at one swept value (None without a sweep); its runs differ only by their seeds."""

    arm: str
    swept: Any
    config: dict[str, Any]
    """Config of `simulate`, with unresolved interpolations."""
    objects: Mapping[str, Any] = field(default_factory=dict)
    """Objects that replace nodes of the config, by their root key."""

    def with_seed(self, seed: int) -> dict[str, Any]:
        return {**self.config, "seed": seed}

    @property
    def shown_config(self) -> dict[str, Any]:
        """The config of all runs, with the name of its class in place of an object."""
        return resolved(self.config) | {key: type(one).__name__ for key, one in self.objects.items()}


class Task(NamedTuple):
    """One run of a study: a point of the sweep, and a seed."""

    point: Point
    seed: int

    @property
    def name(self) -> str:
        return f"arm {self.point.arm}, seed {self.seed}"

    @property
    def label(self) -> dict[str, Any]:
        return {"arm": self.point.arm, "seed": self.seed, "swept": self.point.swept}


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """The runs of a study."""

    table: pd.DataFrame
    """One row per run: arm, seed, swept, then every figure of its summary.json by dotted key."""
    notes: dict[str, list[str]] = field(default_factory=dict)
    """Notes of each arm's first run on the basis of its figures."""
    interrupted: bool = False
    traced: Mapping[tuple[str, Any], TraceRun] = field(default_factory=dict)
    """(arm, swept value) -> values of the requests, if all seeds give the same runs, as those of a trace."""


def summary_of(result: RunResult) -> dict[str, Any]:
    """Returns the summary of a run."""
    return result.summary


def run_all(
    points: Sequence[Point],
    seeds: Sequence[int],
    launcher: Launcher | int,
    report: Report,
    summarise: Callable[[RunResult], dict[str, Any]] = summary_of,
) -> Runs:
    """Runs every point with every seed, all points of a seed first, so that an interrupted study has pairs.

    launcher: see `in_turn`. summarise: returns the figures to keep of a run; a function of a module, because
    it is pickled. If all seeds give the same runs, as those of a trace do, only the first is run, and its
    rows are those of all.
    """
    run_seeds = distinct_seeds([partial(_scenario, point) for point in points], seeds)
    tasks = [Task(point, seed) for seed in run_seeds for point in points]
    rows: dict[int, dict[str, Any]] = {}
    own_notes: dict[int, list[str]] = {}
    traced: dict[tuple[str, Any], TraceRun] = {}
    is_one_run = len(run_seeds) < len(seeds)
    with ctrl_c_noted() as interrupt:
        summaries = in_turn(partial(_summary, summarise, is_one_run), tasks, launcher, interrupt)
        for index, (summary, run) in summaries:
            if run is not None:
                traced[tasks[index].point.arm, tasks[index].point.swept] = run
            row = figures(summary)
            row.pop(INTERRUPTED)
            rows[index] = {**tasks[index].label, **row}
            own_notes[index] = summary["notes"]
            report(len(rows), len(tasks))
        summaries.close()
        interrupted = interrupt.noted and len(rows) < len(tasks)
    columns = ["arm", "seed", "swept"]
    of_runs = [rows[index] for index in sorted(rows)]
    notes: dict[str, list[str]] = {}
    for index in sorted(rows):  # not in the order in which the runs ended
        notes.setdefault(tasks[index].point.arm, own_notes[index])
    if is_one_run:
        of_runs = [{**row, "seed": seed} for seed in seeds for row in of_runs]
    table = pd.DataFrame(of_runs, columns=None if rows else columns)
    return Runs(table=table, notes=notes, interrupted=interrupted, traced=traced)


def settings_that_differ(points: Sequence[Point]) -> dict[str, dict[str, Any]]:
    """Returns dotted key -> arm -> value of settings that differ between arms, at one swept value."""
    of_arms = {point.arm: dict(leaves(point.shown_config)) for point in points}
    keys = dict.fromkeys(key for of_arm in of_arms.values() for key in of_arm)
    rows = {key: {arm: of_arm.get(key, "–") for arm, of_arm in of_arms.items()} for key in keys}
    return {key: row for key, row in rows.items() if len({as_text(value) for value in row.values()}) > 1}


def _scenario(point: Point, seed: int) -> Scenario:
    return build_scenario(resolved(point.with_seed(seed)), point.objects)


def _summary(
    summarise: Callable[[RunResult], dict[str, Any]], is_one_run: bool, task: Task
) -> tuple[dict[str, Any], TraceRun | None]:
    point = task.point
    result = simulate_config(point.with_seed(task.seed), point.objects)
    return summarise(result), TraceRun.of(result) if is_one_run else None
