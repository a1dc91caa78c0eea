"""Simulated figures of measured rows with changed constants, kept in a file for `resume=true`."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from experiments.score.prediction_file import PredictionFile
from experiments.score.trust.cases import SOURCES, Case
from experiments.score.trust.constants import with_values
from experiments.study.launchers.local import Local
from experiments.study.launchers.outcome import WorkerDiedError
from experiments.study.presets import NotSimulatedError, base_scenario
from hwmodels.levels import Calibrated
from sim.engine.clock import Interrupt

Figures = dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One simulation of a measured row."""

    case: Case
    values: Mapping[str, float]
    """Constants that differ from the profile's and the calibration's."""
    calibration: str | None = None
    """GPU whose calibration is used in place of the row's own; None: its own."""
    number: int = 0
    """Number of the run of these values: each has a seed of its own, and run 0 that of the scenario."""

    @property
    def name(self) -> str:
        """The id in the file: the row, the calibration of another GPU, and the constants."""
        constants = [f"{name}={self.values[name]:.6g}" for name in sorted(self.values)]
        number = [f"run={self.number}"] if self.number else []
        calibration = [self.calibration] if self.calibration else []
        return " ".join([self.case.key, *calibration, *constants, *number])

    def run(self) -> dict[str, str | float]:
        """Simulates; returns the figures and status ok, or the reason why there are none as the status."""
        case, source = self.case, SOURCES[self.case.table]
        try:
            scenario = source.scenario_of(case.row, Calibrated())
            if self.calibration is not None:
                relative = base_scenario(case.row["model"], self.calibration, case.profile).calibration
                scenario = replace(scenario, calibration=relative)
            if self.number:
                scenario = replace(scenario, seed=zlib.crc32(f"{case.key} {self.number}".encode()))
            return {
                "id": self.name,
                **source.figures_of(case.row, with_values(scenario, self.values)),
                "status": "ok",
            }
        except (NotSimulatedError, ValueError) as error:
            return {"id": self.name, "status": " ".join(str(error).split())}


@dataclass(kw_only=True, slots=True)
class Predictions:
    """Figures by task: those in the file, and new ones, which are appended to it as they come."""

    file: PredictionFile
    jobs: int | None
    """Worker processes; None: one per core."""

    def of(self, task: Task) -> Figures:
        """Returns the figures of a task that has run; empty if it cannot be simulated."""
        row = self.file.rows[task.name]
        return {} if row["status"] != "ok" else {k: v for k, v in row.items() if k not in ("id", "status")}

    def missing(self, tasks: Sequence[Task]) -> list[Task]:
        """Returns the tasks that have not run, each once."""
        return list({task.name: task for task in tasks if task.name not in self.file.rows}.values())

    def run(self, tasks: Sequence[Task], interrupt: Interrupt, report: Callable[[int, int], None]) -> None:
        """Simulates the missing tasks. report: called with the numbers of results and of refusals so far.

        Raises KeyboardInterrupt after Ctrl-C; what has run is in the file.
        """
        left, refused = self.missing(tasks), 0
        outcomes = Local(jobs=self.jobs).outcomes(Task.run, left, interrupt)
        try:
            for number, outcome in enumerate(outcomes, start=1):
                row: dict[str, str | float]
                if isinstance(outcome.error, WorkerDiedError):
                    row = {"id": left[outcome.index].name, "status": str(outcome.error)}
                elif outcome.error is not None:
                    raise outcome.error
                elif outcome.result is None:
                    continue
                else:
                    row = outcome.result
                self.file.append(row)
                refused += row["status"] != "ok"
                report(number - refused, refused)
        finally:
            outcomes.close()
        if self.missing(tasks):
            raise KeyboardInterrupt


def columns() -> tuple[str, ...]:
    """Returns the columns of the file: id, the metrics of all tables, status."""
    metrics = {name: None for source in SOURCES.values() for name in source.metrics}
    return ("id", *metrics, "status")
