"""Figures of whole tasks of agents: several requests that together do one thing.

first call arrives                                  last call ends
   |---------------- task latency -----------------------|
makespan: from the first arrival of all tasks to the end of the last task
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.metrics.definitions import describe
from sim.metrics.window import Window


def task_figures(
    requests: pd.DataFrame, num_calls: NDArray[np.int64], window: Window, slo_s: float | None
) -> dict[str, Any]:
    """Computes the figures of the tasks that began inside the window.

    requests: the request records; their session_id is the task. num_calls[t]: calls that task t needs; it is
    finished if so many have finished. A task that is not finished has no latency and does not meet the SLO.
    slo_s: latency of a task that counts as good; None: there is no SLO.
    """
    tasks = requests.groupby("session_id")
    begun = tasks["arrival_s"].min()
    rows = begun.index.to_numpy()
    inside = window.holds(begun.to_numpy(np.float64))
    status = requests["status"] == "finished"
    done = status.groupby(requests["session_id"]).sum().to_numpy() >= num_calls[rows]
    ended_s = tasks["finished_s"].max().to_numpy(np.float64)
    latency_s = np.where(done, ended_s - begun.to_numpy(np.float64), np.nan)[inside]
    count, finished = int(inside.sum()), int((done & inside).sum())
    ends_s = ended_s[done & inside]
    share = float(np.mean(latency_s <= slo_s)) if slo_s is not None and count else None
    return {
        "count": count,
        "finished": finished,
        "not_finished": count - finished,
        "calls_per_task": float(num_calls[rows][inside].mean()) if count else None,
        "latency": describe(latency_s),
        "makespan_s": float(ends_s.max() - begun.to_numpy(np.float64)[inside].min()) if len(ends_s) else None,
        "slo_s": slo_s,
        "slo_share": share,
    }
