"""The output tokens that speculation brings beside one per pass, and the times at which they come."""

from __future__ import annotations

import numpy as np

from sim.metrics.definitions import Counts, Times
from sim.metrics.window import Window
from sim.records.run import RunRecords


def iteration_ends_s(records: RunRecords) -> Times:
    """Returns the ends of the iterations. A rounded sum does not exceed the end of the run."""
    iterations = records.iterations
    start_s, duration_s = (iterations[name].to_numpy(np.float64) for name in ("start_s", "duration_s"))
    ends_s: Times = np.minimum(start_s + duration_s, records.end_s)
    return ends_s


def kept_over_time(records: RunRecords) -> tuple[Times, Counts]:
    """Returns the times at which kept draft tokens come, and their numbers; none if no engine speculates.

    A burst of k + 1 tokens of a request ends one gap, which counts one of them; its k draft tokens are here.
    """
    if "kept_tokens" not in records.iterations:
        return np.empty(0), np.empty(0, np.int64)
    kept = records.iterations["kept_tokens"].to_numpy()
    at = np.flatnonzero(kept)
    return iteration_ends_s(records)[at], kept[at]


def num_kept_inside(records: RunRecords, window: Window) -> int:
    """Counts the kept draft tokens inside the window."""
    time_s, kept = kept_over_time(records)
    return int(kept[window.holds(time_s)].sum())
