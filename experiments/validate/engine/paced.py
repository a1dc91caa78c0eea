"""A clock for a CPU whose speed varies: it counts seconds of the machine as it was when calibrated.

Other processes on the same CPU make every step longer, also in thread time, by up to 40 % for seconds at a
time (`experiments.calibrate.engine.pace`). So a reference step is run before, between and after the engine's
steps, whose usual time is known from the calibration; the ratio of its time to the usual one scales thread
time. The reference step itself takes no time on this clock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from experiments.calibrate.engine.pace import CoreTime, Pace

REST = 4
"""Time between two reference steps, in units of a reference step.

On two cores with a load average of 5, the corrected times of a tenth of a run deviate from the mean by 3 to
4 %; with a rest of 15, by 4 to 9 %.
"""
NEAR = 3
"""Number of recent reference steps whose median is the pace."""


class PacedClock:
    """A `realengine.clock.Clock`. reference: runs the step; usual_s: its time during the calibration."""

    def __init__(self, reference: Callable[[], object], usual_s: float) -> None:
        self._reference = reference
        self._usual_s = usual_s
        self._paces: list[float] = []
        self._core = CoreTime()
        self._near: deque[float] = deque(maxlen=NEAR)
        self._slower = 1.0
        self._time_s = 0.0
        self._since_s = time.thread_time()
        self._look_often()

    def now(self) -> float:
        return self._time_s + (time.thread_time() - self._since_s) / self._slower

    def sleep(self, seconds: float) -> None:
        self._time_s += seconds

    def look(self) -> None:
        """Measures the machine's speed if the last time is long ago. Call it between two steps."""
        if time.thread_time() - self._since_s > REST * self._usual_s:
            self._look()

    def end(self) -> Pace:
        """Measures the machine's speed after the run, and returns the pace since the start."""
        self._look_often()
        return Pace.of(self._paces, self._core.share)

    def _look_often(self) -> None:
        """Measures the speed until no earlier moment counts."""
        for _ in range(NEAR):
            self._look()

    def _look(self) -> None:
        self._time_s = self.now()
        begin_s = time.thread_time()
        self._reference()
        self._since_s = time.thread_time()
        self._near.append((self._since_s - begin_s) / self._usual_s)
        self._slower = float(np.median(self._near))
        if len(self._near) == NEAR:
            self._paces.append(self._slower)
