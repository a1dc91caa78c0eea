"""Pace of a shared machine during a measurement: how long it takes for the same work, relative to the usual.

Other programs and other virtual machines on the same host take cache, memory bandwidth and clock, so that
the same step takes 20 to 40 % longer, also in thread time. The slowdown lasts: consecutive runs of different
steps deviate by nearly the same factor (correlation 0.8, and still 0.5 a minute later).

`windtunnel calibrate` estimates the pace from the measured times themselves. `windtunnel validate` runs a
reference step between the engine's steps, and compares its time with that in the calibration. Times are
corrected by the pace in both. The correction is not exact: on two cores with a load average of 5 to 13,
repeated runs agreed within 1 %, but calibrations predicted the runs' iterations 5 to 9 % too long. So both
commands state by how much the pace varied and which share of a core the thread got. They call a measurement
too noisy if the pace varied by more than `MOST_VARIATION`, or the share was below `LEAST_CORE_SHARE`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

NEAR = 3
"""Runs before and after a run from which its slowdown is estimated."""
ROUNDS = 8
"""Iterations after which the estimates have converged."""
MOST_VARIATION = 0.25
"""Largest variation of the pace at which a measurement of times is accepted."""
LEAST_CORE_SHARE = 0.8
"""Smallest share of a core, CPU time over wall time, at which a measurement of times is accepted."""


class Pace(NamedTuple):
    """Time of the reference step relative to its usual time: median, 10th and 90th percentile.

    core_share: CPU time of the measuring thread over wall time; the rest of the time, other programs ran.
    """

    median: float
    p10: float
    p90: float
    core_share: float = 1.0

    @classmethod
    def of(cls, paces: Sequence[float] | NDArray[np.float64], core_share: float) -> Pace:
        """Summarises the paces at different moments of a measurement."""
        p10, median, p90 = np.percentile(paces, [10, 50, 90]).tolist()
        return cls(median, p10, p90, core_share)


class CoreTime:
    """CPU time of this thread and wall time since the start."""

    def __init__(self) -> None:
        self._cpu_s, self._wall_s = time.thread_time(), time.perf_counter()

    @property
    def share(self) -> float:
        """Share of a core that the thread got; clocks differ, so it is at most 1."""
        wall_s = time.perf_counter() - self._wall_s
        return min((time.thread_time() - self._cpu_s) / wall_s, 1.0) if wall_s > 0 else 1.0


class Reference(NamedTuple):
    """Usual seconds of the reference step, and the pace while they were measured, whose median is 1.

    pace: None for a calibration that did not record it.
    """

    seconds: float
    pace: Pace | None


def variation(*measurements: Pace) -> float:
    """Returns by which share the pace varied over all measurements, without the extreme tenths of each.

    0.25: the slowest moment took 1.25 times as long as the fastest one.
    """
    return max(one.p90 for one in measurements) / min(one.p10 for one in measurements) - 1


def is_noisy(*measurements: Pace) -> bool:
    """Returns whether the pace varied too much, or the thread got too little of a core."""
    if not measurements:
        return False
    return variation(*measurements) > MOST_VARIATION or _least_share(measurements) < LEAST_CORE_SHARE


def in_words(*measurements: Pace) -> str:
    """Describes the variation of the pace and the share of a core, and which ones are accepted."""
    fastest, slowest = min(one.p10 for one in measurements), max(one.p90 for one in measurements)
    varied, accepted = 100 * variation(*measurements), 100 * MOST_VARIATION
    share, needed = 100 * _least_share(measurements), 100 * LEAST_CORE_SHARE
    return (
        f"the machine's pace varied by {varied:.0f} % (a reference step took {fastest:.2f} to {slowest:.2f} "
        f"times its usual time; {accepted:.0f} % is accepted) and its thread got {share:.0f} % of a core (at "
        f"least {needed:.0f} % is needed)"
    )


def _least_share(measurements: Sequence[Pace]) -> float:
    return min(one.core_share for one in measurements)


def paces(places: NDArray[np.intp], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the slowdown of every run, in the order of the runs: [N], with median 1.

    places: index of the step that each run repeats. The usual time of a step is the median of its
    repetitions, each divided by its slowdown. The slowdown of a run is the median of its neighbours' times,
    each divided by the usual time of its step.
    """
    log_s = np.log(seconds)
    pace = np.zeros(len(log_s))
    near = min(NEAR, len(log_s) - 1)
    for _ in range(ROUNDS):
        usual = pd.Series(log_s - pace).groupby(places).transform("median").to_numpy()
        windows = sliding_window_view(np.pad(log_s - usual, near, "reflect"), 2 * near + 1)
        pace = np.median(np.delete(windows, near, axis=1), axis=1)
    factors: NDArray[np.float64] = np.exp(pace - np.median(pace))
    return factors
