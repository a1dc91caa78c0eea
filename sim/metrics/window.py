"""The measured part of a run: all of it, or what remains without the warm-up and the cool-down."""

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
        """True if trimming left nothing. An untrimmed run of 0 s is not empty."""
        return self.start_s == self.end_s > 0

    def holds(self, time_s: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Returns which times are inside the window; NaN, for events that did not happen, is not."""
        return (time_s >= self.start_s) & (time_s <= self.end_s) & (not self.is_empty)

    def overlap_s(self, start_s: NDArray[np.float64], duration_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Computes the seconds of each interval that lie inside the window."""
        inside = np.minimum(start_s + duration_s, self.end_s) - np.maximum(start_s, self.start_s)
        # An interval wholly inside keeps its duration, as (start + duration) - start would be rounded.
        whole = (start_s >= self.start_s) & (start_s + duration_s <= self.end_s)
        return np.where(whole, duration_s, np.maximum(inside, 0.0))


def measured_window(end_s: float, *, warmup_s: float = 0.0, cooldown_s: float = 0.0) -> Window:
    """Returns what remains of a run from 0 to end_s; if nothing remains, an empty window at end_s.

    Raises ValueError for a warm-up or cool-down that is negative or not finite.
    """
    for key, value in (("warmup_s", warmup_s), ("cooldown_s", cooldown_s)):
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{key}={value}: must be finite and >= 0 s")
    if warmup_s + cooldown_s >= end_s:
        return Window(end_s, end_s)
    return Window(warmup_s, end_s - cooldown_s)
