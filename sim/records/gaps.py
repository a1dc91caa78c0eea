"""Gaps between consecutive tokens, as arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Gaps(NamedTuple):
    """Gaps between consecutive tokens: value in seconds, number of sequences, time of its end."""

    gap_s: NDArray[np.float64]
    gap_count: NDArray[np.int64]
    gap_end_s: NDArray[np.float64]

    def part(self, first: int, end: int) -> Gaps:
        """Returns the gaps from `first` to end - 1, in the same memory."""
        return Gaps(self.gap_s[first:end], self.gap_count[first:end], self.gap_end_s[first:end])
