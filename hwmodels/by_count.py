"""Functions of a count, tabulated on demand.

Their main use: GPU seconds of a batch that depend only on its numbers of tokens and of sampled rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwmodels.iterations.layout import ParallelLayout, RankBatch
from hwmodels.iterations.ops import Operator, Part, Per

Counts = NDArray[np.float64]
Seconds = NDArray[np.float64]

PIECE = 256


class ByCount:
    """Table of formula(n) for n = 0, 1, ...: a lookup takes 60 ns, a computation up to milliseconds.

    Values are always computed in the same pieces of 256 counts, so that numbers and arrays agree to the last
    bit.
    """

    def __init__(self, formula: Callable[[Counts], Seconds]) -> None:
        self._formula = formula
        self._array = np.empty(0)
        self._list: list[float | None] = []

    def of(self, counts: Any) -> Any:
        """Returns the value at a count, or those at an array of counts."""
        if type(counts) is np.ndarray:
            return self._of_many(counts)
        try:
            known = self._list[counts]
        except IndexError:
            known = None
        return self._computed(counts) if known is None else known

    def _of_many(self, counts: NDArray[np.intp]) -> Seconds:
        try:
            values = self._array.take(counts)
        except IndexError:
            self._reach(int(counts.max(initial=0)))
            values = self._array.take(counts)
        if np.isnan(values).any():
            for piece in np.unique(counts[np.isnan(values)] // PIECE).tolist():
                self._fill(piece)
            values = self._array.take(counts)
        return values

    def _computed(self, count: int) -> float:
        self._reach(count)
        self._fill(count // PIECE)
        return float(self._array[count])

    def _reach(self, count: int) -> None:
        if count >= len(self._list):
            size = max(2 * len(self._list), (count // PIECE + 1) * PIECE)
            added = size - len(self._list)
            self._array = np.concatenate([self._array, np.full(added, np.nan)])
            self._list += [None] * added

    def _fill(self, piece: int) -> None:
        start = piece * PIECE
        values = self._formula(np.arange(start, start + PIECE, dtype=np.float64))
        self._array[start : start + PIECE] = values
        self._list[start : start + PIECE] = values.tolist()


class CountedTimes:
    """Sums of the operators of a layout by count; numbers and arrays give the same bits."""

    def __init__(self, operators: Sequence[Operator], layout: ParallelLayout) -> None:
        self._operators = operators
        shared = layout.stage_size > layout.tensor_parallel_size or layout.micro_batches > 1
        together = [Per.token] if shared else [Per.token, Per.any_token]
        self.tokens_s = ByCount(partial(self._sum, together))
        """Seconds by number of tokens of this device; those of the experts included if they are the same."""
        self.any_tokens_s = ByCount(partial(self._sum, [Per.any_token])) if shared else None
        """Seconds of the experts by number of tokens of all devices."""
        self.rows_s = ByCount(partial(self._sum, [Per.row]))
        ends = (Part.first, Part.between, Part.last)
        self._ends_s = [ByCount(partial(self._sum, [Per.token], part=part)) for part in ends]

    def of(self, computed: Any, all_tokens: Any, rows: Any) -> Any:
        """Returns the seconds of a batch, or of each; computed: tokens of this device with padding."""
        gpu_s = self.tokens_s.of(computed) + self.rows_s.of(rows)
        return gpu_s if self.any_tokens_s is None else gpu_s + self.any_tokens_s.of(all_tokens)

    def ends(self, computed: Any, rows: Any) -> tuple[Any, Any, Any]:
        """Returns seconds of a micro-batch before, between and after the layers; numbers or arrays."""
        first_s, between_s, last_s = (table.of(computed) for table in self._ends_s)
        return first_s, between_s, last_s + self.rows_s.of(rows)

    def _sum(self, kinds: Iterable[Per], counts: Counts, part: Part | None = None) -> Seconds:
        """Sums seconds of operators of these kinds (and part) by count of tokens or rows; 0 takes 0 s."""
        some = np.maximum(counts, 1)
        batch = RankBatch(some, some, some, 0, 0, 0, 0, 0, 0)
        total = np.zeros_like(counts)
        for op in self._operators:
            if op.per in kinds and part in (None, op.part):
                total += op.calls * op.seconds(batch)
        return total * np.minimum(counts, 1)
