"""A clock for a CPU whose speed varies: it counts seconds of the machine as it was when calibrated.

Other processes on the same CPU make every step longer, also in thread time, by up to 40 % for seconds at a
time (`experiments.calibrate.engine.pace`). So a reference step is run now and then, whose usual time is known
from the calibration; the ratio of its time to the usual one scales thread time. The reference step itself
takes no time on this clock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

REST = 15
"""Time between two reference steps, in units of a reference step: 6 % overhead."""
NEAR = 5
"""Number of recent reference steps whose median is the pace."""


class Pace(NamedTuple):
    """Ratio of the reference step's time to its usual time: median, 10th and 90th percentile."""

    median: float
    p10: float
    p90: float


class PacedClock:
    """A `realengine.clock.Clock`. reference: runs the step; usual_s: its time during the calibration."""

    def __init__(self, reference: Callable[[], object], usual_s: float) -> None:
        self._reference = reference
        self._usual_s = usual_s
        self._taken: list[float] = []
        self._near: deque[float] = deque(maxlen=NEAR)
        self._slower = 1.0
        self._time_s = 0.0
        self._since_s = time.thread_time()
        for _ in range(NEAR):
            self._look()

    def now(self) -> float:
        return self._time_s + (time.thread_time() - self._since_s) / self._slower

    def sleep(self, seconds: float) -> None:
        self._time_s += seconds

    def look(self) -> None:
        """Measures the machine's speed if the last time is long ago. Call it between two steps."""
        if time.thread_time() - self._since_s > REST * self._usual_s:
            self._look()

    @property
    def pace(self) -> Pace:
        """Ratio of the reference step's time to its usual time, since the start."""
        p10, median, p90 = np.percentile(self._taken, [10, 50, 90]).tolist()
        return Pace(median, p10, p90)

    def _look(self) -> None:
        self._time_s = self.now()
        begin_s = time.thread_time()
        self._reference()
        self._since_s = time.thread_time()
        self._near.append((self._since_s - begin_s) / self._usual_s)
        self._slower = float(np.median(self._near))
        self._taken.append(self._near[-1])
