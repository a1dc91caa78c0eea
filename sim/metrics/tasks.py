"""Figures of whole tasks of agents: several requests that together do one thing.

first call arrives                                  last call ends
   |---------------- task latency -----------------------|
makespan: from the first arrival of all tasks to the end of the last task
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.metrics.definitions import describe
from sim.metrics.window import Window


@dataclass(frozen=True, slots=True)
class Tasks:
    """The tasks of a run by number: first arrival, end of the last call, and whether all have ended."""

    number: NDArray[np.int64]
    begun_s: NDArray[np.float64]
    ended_s: NDArray[np.float64]
    done: NDArray[np.bool_]

    @classmethod
    def of(cls, requests: pd.DataFrame, num_calls: NDArray[np.int64]) -> Tasks:
        """Returns the tasks of a table of requests. Others as for `task_figures`."""
        tasks = requests.groupby("session_id")
        begun = tasks["arrival_s"].min()
        number = begun.index.to_numpy()
        status = requests["status"] == "finished"
        return cls(
            number=number,
            begun_s=begun.to_numpy(np.float64),
            ended_s=tasks["finished_s"].max().to_numpy(np.float64),
            done=status.groupby(requests["session_id"]).sum().to_numpy() >= num_calls[number],
        )

    @property
    def latency_s(self) -> NDArray[np.float64]:
        """Latency of each task; NaN if it has not finished."""
        return np.where(self.done, self.ended_s - self.begun_s, np.nan)


def task_times_s(requests: pd.DataFrame, num_calls: NDArray[np.int64]) -> NDArray[np.float64]:
    """Computes, for each request, the latency of the task that it belongs to; NaN if that has not finished.

    requests, num_calls: see `task_figures`.
    """
    tasks = Tasks.of(requests, num_calls)
    latency_s: NDArray[np.float64] = tasks.latency_s[
        np.searchsorted(tasks.number, requests["session_id"].to_numpy())
    ]
    return latency_s


def task_figures(
    requests: pd.DataFrame, num_calls: NDArray[np.int64], window: Window, slo_s: float | None
) -> dict[str, Any]:
    """Computes the figures of the tasks that began inside the window.

    requests: the request records; their session_id is the task. num_calls[t]: calls that task t needs; it is
    finished if so many have finished. A task that is not finished has no latency and does not meet the SLO.
    slo_s: latency of a task that counts as good; None: there is no SLO.
    """
    return figures_of_tasks(Tasks.of(requests, num_calls), num_calls, window, slo_s)


def figures_of_tasks(
    tasks: Tasks, num_calls: NDArray[np.int64], window: Window, slo_s: float | None
) -> dict[str, Any]:
    """Computes the figures of `task_figures`."""
    inside = window.holds(tasks.begun_s)
    latency_s = tasks.latency_s[inside]
    count, finished = int(inside.sum()), int((tasks.done & inside).sum())
    ends_s = tasks.ended_s[tasks.done & inside]
    share = float(np.mean(latency_s <= slo_s)) if slo_s is not None and count else None
    return {
        "count": count,
        "finished": finished,
        "not_finished": count - finished,
        "calls_per_task": float(num_calls[tasks.number][inside].mean()) if count else None,
        "latency": describe(latency_s),
        "makespan_s": float(ends_s.max() - tasks.begun_s[inside].min()) if len(ends_s) else None,
        "slo_s": slo_s,
        "slo_share": share,
    }
