"""Speed of a shared machine during a measurement, estimated from the measured times themselves.

Other virtual machines on the same host take cache, memory bandwidth and clock, so that the same step takes
20 to 40 % longer, also in thread time. The slowdown lasts: consecutive runs of different steps deviate by
nearly the same factor (correlation 0.8, and still 0.5 a minute later).
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

NEAR = 3
"""Runs before and after a run from which its slowdown is estimated."""
ROUNDS = 8
"""Iterations after which the estimates have converged."""


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
