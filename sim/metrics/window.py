"""The part of a run that is measured: warm-up and cool-down cut off, or all of it."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Window(NamedTuple):
    """Simulated time from start_s to end_s, both included: the last token of a run comes at its very end."""

    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def is_empty(self) -> bool:
        """Whether trimming left nothing. A whole run that takes no time, all at 0 s, is not empty."""
        return self.start_s == self.end_s > 0

    def holds(self, time_s: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Which moments fall into the window; NaN, for what never happened, does not."""
        return (time_s >= self.start_s) & (time_s <= self.end_s) & (not self.is_empty)

    def overlap_s(self, start_s: NDArray[np.float64], duration_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds of each interval that lie inside the window."""
        inside = np.minimum(start_s + duration_s, self.end_s) - np.maximum(start_s, self.start_s)
        # An interval wholly inside keeps its own duration: (start + duration) - start would round.
        whole = (start_s >= self.start_s) & (start_s + duration_s <= self.end_s)
        return np.where(whole, duration_s, np.maximum(inside, 0.0))


def measured_window(end_s: float, *, warmup_s: float = 0.0, cooldown_s: float = 0.0) -> Window:
    """The window left of a run from 0 to end_s; empty, at end_s, where trimming takes everything.

    Raises ValueError for a warm-up or cool-down below 0 s.
    """
    for key, value in (("warmup_s", warmup_s), ("cooldown_s", cooldown_s)):
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{key}={value}: must be finite and >= 0 s")
    if warmup_s + cooldown_s >= end_s:
        return Window(end_s, end_s)
    return Window(warmup_s, end_s - cooldown_s)
