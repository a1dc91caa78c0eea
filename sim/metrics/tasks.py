"""Metrics of complete agent tasks: several requests that belong together.

first call arrives                                  last call ends
   |---------------- task latency -----------------------|
makespan: from the first arrival of all tasks to the end of the last task
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.metrics.definitions import Window, describe, times
from sim.metrics.workload import WorkloadRecords
from sim.records.table import AnyTable, column

NewNumCalls = Callable[[], NDArray[np.int64]]


class Tasks(NamedTuple):
    """Tasks by number: first arrival, end of the last call, and whether all have ended."""

    number: NDArray[np.int64]
    begun_s: NDArray[np.float64]
    ended_s: NDArray[np.float64]
    done: NDArray[np.bool_]

    @property
    def latency_s(self) -> NDArray[np.float64]:
        """Latency of each task; NaN if it has not finished."""
        return np.where(self.done, self.ended_s - self.begun_s, np.nan)


class TaskTable:
    """The calls of each task that were added so far. Uses 24 bytes per task."""

    def __init__(self) -> None:
        self._begun_s = np.zeros(0)
        self._ended_s = np.zeros(0)
        self._num_finished = np.zeros(0, np.int64)

    def add(self, requests: AnyTable) -> None:
        """Adds calls; their session is the task."""
        task = column(requests, "session_id", np.int64)
        self._reach(int(task.max(initial=-1)) + 1)
        np.minimum.at(self._begun_s, task, times(requests, "arrival_s"))
        np.fmax.at(self._ended_s, task, times(requests, "finished_s"))
        np.add.at(self._num_finished, task, (column(requests, "status") == "finished"))

    def merge(self, other: TaskTable) -> None:
        """Adds the calls of other, which is not changed."""
        size = len(other._begun_s)
        self._reach(size)
        np.minimum(self._begun_s[:size], other._begun_s, out=self._begun_s[:size])
        np.maximum(self._ended_s[:size], other._ended_s, out=self._ended_s[:size])
        self._num_finished[:size] += other._num_finished

    def tasks(self, num_calls: NDArray[np.int64], number: NDArray[np.int64] | None = None) -> Tasks:
        """Returns tasks. num_calls: the number of calls of each. number: their numbers.

        None: all begun tasks.
        """
        if number is None:
            number = np.flatnonzero(np.isfinite(self._begun_s))
        return Tasks(
            number=number,
            begun_s=self._begun_s[number],
            ended_s=self._ended_s[number],
            done=self._num_finished[number] >= num_calls[number],
        )

    def _reach(self, size: int) -> None:
        """Makes room for tasks."""
        missing = size - len(self._begun_s)
        if missing > 0:
            self._begun_s = np.append(self._begun_s, np.full(missing, np.inf))
            self._ended_s = np.append(self._ended_s, np.full(missing, -np.inf))
            self._num_finished = np.append(self._num_finished, np.zeros(missing, np.int64))


class TasksFigure:
    """The section `tasks`, of the tasks that began inside the window: see `sim.metrics.workload`.

    new_num_calls: returns the number of calls of each task, which is finished when all of them have finished.
    An unfinished task has no latency and does not meet the SLO. slo_s: maximum latency of a good task; None:
    no SLO.
    """

    needs_tokens = False
    lack: str | None = None

    def __init__(self, new_num_calls: NewNumCalls, slo_s: float | None) -> None:
        self._new_num_calls = new_num_calls
        self._slo_s = slo_s
        self._table = TaskTable()

    def add(self, records: WorkloadRecords) -> None:
        """Adds calls; their session is the task."""
        self._table.add(records.requests)

    def merge(self, other: TasksFigure) -> None:
        """Adds the calls of other, which is not changed."""
        self._table.merge(other._table)

    def value(self, window: Window) -> Mapping[str, Any]:
        """Returns the section `tasks` of the summary, with durations in s."""
        num_calls = self._new_num_calls()
        tasks = self._table.tasks(num_calls)
        inside = window.holds(tasks.begun_s)
        latency_s = tasks.latency_s[inside]
        count, finished = int(inside.sum()), int((tasks.done & inside).sum())
        ends_s = tasks.ended_s[tasks.done & inside]
        share = float(np.mean(latency_s <= self._slo_s)) if self._slo_s is not None and count else None
        section = {
            "count": count,
            "finished": finished,
            "not_finished": count - finished,
            "calls_per_task": float(num_calls[tasks.number][inside].mean()) if count else None,
            "latency": describe(latency_s),
            "makespan_s": float(ends_s.max() - tasks.begun_s[inside].min()) if len(ends_s) else None,
            "slo_s": self._slo_s,
            "slo_share": share,
        }
        return {"tasks": section}

    def __getstate__(self) -> dict[str, Any]:
        """Drops the function that counts calls: the copy can only be merged."""
        return {name: value for name, value in vars(self).items() if name != "_new_num_calls"}


class TaskLatencies:
    """The latency of the complete task of each call: see `sim.metrics.workload.OwnLatency`.

    new_num_calls: returns the number of calls of each task.
    """

    needs_tokens = numbers_matter = False

    def __init__(self, new_num_calls: NewNumCalls) -> None:
        self._num_calls = new_num_calls()
        self._table = TaskTable()

    def see(self, records: WorkloadRecords) -> None:
        """Notes calls that have ended."""
        self._table.add(records.requests)

    def known(self, records: WorkloadRecords, open_sessions: Collection[int]) -> NDArray[np.bool_]:
        """Returns the calls whose tasks have no more calls."""
        task = column(records.requests, "session_id", np.int64)
        return ~np.isin(task, list(open_sessions))

    def latencies(self, records: WorkloadRecords) -> Mapping[str, NDArray[np.float64]]:
        """Returns the latency of each call's task, in seconds; NaN: it has not finished."""
        task = column(records.requests, "session_id", np.int64)
        return {"task": self._table.tasks(self._num_calls, task).latency_s}
