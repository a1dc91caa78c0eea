"""How fast a shared machine was at every moment of a measurement, from what was measured itself.

Neighbours of a virtual machine take caches, memory bandwidth and clock; the same step then takes longer, in
thread time too. That lasts: repetitions of different steps that follow each other are off by much the same
factor (correlation 0.8, and still 0.5 a minute later), and it is as large as 20 to 40 %.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

NEAR = 3
"""Runs before and behind one that say how fast the machine was."""
ROUNDS = 8
"""Until what is usual for a step and what is due to the moment have settled."""


def paces(places: NDArray[np.intp], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of runs in their order: how many times as long as usual they took for reasons of the moment. [N]

    places: which step each of them repeats. What is usual for a step is the median of its repetitions without
    their pace; the pace is the median of what its neighbours take over their usual, 1 in the middle of all.
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
