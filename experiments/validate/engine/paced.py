"""Time on a CPU that is now faster and now slower: seconds of the machine as it was when it was calibrated.

Neighbours on the same processor make every step longer, in thread time too, by up to 40 % for seconds at a
time (`experiments.calibrate.engine.pace`). So a reference step is run now and then, whose usual time is known
from the calibration; what it takes more says how much less a second of thread time is worth. The reference
step itself takes no time on this clock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

REST = 15
"""Reference steps' time between two of them: 6 % more work."""
NEAR = 5
"""Reference steps whose median is the pace."""


class Pace(NamedTuple):
    """How many times as long as usual the reference step took: median, 10th and 90th percentile."""

    median: float
    p10: float
    p90: float


class PacedClock:
    """A `realengine.clock.Clock`. reference: runs the step; usual_s: what it took in the calibration."""

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
        """See how fast the machine is, if the last time is long ago. To be called between two steps."""
        if time.thread_time() - self._since_s > REST * self._usual_s:
            self._look()

    @property
    def pace(self) -> Pace:
        """Since the beginning."""
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
