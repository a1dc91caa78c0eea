"""Figures of whole tasks from parts of the records of a run: see `sim.metrics.tasks`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.metrics.tasks import Tasks, figures_of_tasks
from sim.metrics.window import Window
from sim.metrics.workload_records import WorkloadRecords


class TasksFold:
    """The section `tasks`. Keeps 24 bytes per task.

    new_num_calls: returns the calls that each task needs. slo_s: see `task_figures`.
    """

    needs_tokens = False
    lack: str | None = None

    def __init__(self, new_num_calls: Callable[[], NDArray[np.int64]], slo_s: float | None) -> None:
        self._new_num_calls = new_num_calls
        self._slo_s = slo_s
        self._begun_s = np.zeros(0)
        self._ended_s = np.zeros(0)
        self._num_finished = np.zeros(0, np.int64)

    def add(self, records: WorkloadRecords) -> None:
        """Adds calls; their session is the task."""
        requests = records.requests
        task = requests["session_id"].to_numpy(np.int64)
        self._reach(int(task.max(initial=-1)) + 1)
        np.minimum.at(self._begun_s, task, requests["arrival_s"].to_numpy(np.float64))
        np.fmax.at(self._ended_s, task, requests["finished_s"].to_numpy(np.float64))
        np.add.at(self._num_finished, task, (requests["status"] == "finished").to_numpy(np.bool_))

    def merge(self, other: TasksFold) -> None:
        """Adds the calls of other, which is not changed."""
        size = len(other._begun_s)
        self._reach(size)
        np.minimum(self._begun_s[:size], other._begun_s, out=self._begun_s[:size])
        np.maximum(self._ended_s[:size], other._ended_s, out=self._ended_s[:size])
        self._num_finished[:size] += other._num_finished

    def figures(self, window: Window) -> Mapping[str, Any]:
        """Returns the section `tasks` of the summary, with durations in s."""
        num_calls = self._new_num_calls()
        number = np.flatnonzero(np.isfinite(self._begun_s))
        tasks = Tasks(
            number=number,
            begun_s=self._begun_s[number],
            ended_s=self._ended_s[number],
            done=self._num_finished[number] >= num_calls[number],
        )
        return {"tasks": figures_of_tasks(tasks, num_calls, window, self._slo_s)}

    def _reach(self, size: int) -> None:
        """Makes room for tasks."""
        missing = size - len(self._begun_s)
        if missing > 0:
            self._begun_s = np.append(self._begun_s, np.full(missing, np.inf))
            self._ended_s = np.append(self._ended_s, np.full(missing, -np.inf))
            self._num_finished = np.append(self._num_finished, np.zeros(missing, np.int64))

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out how the calls are counted: the copy can be merged only."""
        return {name: value for name, value in vars(self).items() if name != "_new_num_calls"}
