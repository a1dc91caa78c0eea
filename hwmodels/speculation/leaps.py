"""Leaps over passes of the same sequences with the same number of draft tokens: most iterations of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwmodels.iterations.decodes import OneByOne, Prices, ends_of
from hwmodels.iterations.iteration import DraftWork, IterationShape

MOST_PRICES = 50_000
"""Numbers of sequences of which the prices are kept."""


def pass_of_equal(num_seqs: int, context_tokens: Any, rows: int, steps: int) -> IterationShape:
    """Returns a pass in which each sequence verifies `rows` draft tokens, and gets as many for the next.

    steps: levels of these tokens; with a chain, each is one. context_tokens: tokens attended to, summed over
    sequences; a number or an array.
    """
    tokens = num_seqs * rows
    pairs = rows * context_tokens + num_seqs * (rows * (rows + 1) // 2)
    drafts = DraftWork(tokens, pairs, num_seqs if rows else 0, steps, tokens)
    return IterationShape(num_seqs, context_tokens, 0, 0, 0, 0, num_seqs + tokens, None, drafts)


def one_by_one(seconds: Callable[[IterationShape], Any], num_seqs: int, rows: int, steps: int) -> OneByOne:
    """Returns the prices of the passes of the same sequences by a function of shapes."""
    return OneByOne(lambda contexts: seconds(pass_of_equal(num_seqs, contexts, rows, steps)))


class EqualPrices:
    """Prices of passes with drafting after them: those of `passes` and `drafting`, and at least least_s."""

    def __init__(self, passes: Prices, drafting: Prices, least_s: float) -> None:
        self.few = min(passes.few, drafting.few)
        self._passes, self._drafting, self._least_s = passes, drafting, least_s

    def each(self, contexts: Sequence[float]) -> list[float]:
        """Returns the seconds at each number of context tokens."""
        least_s, passes_s, after_s = self._least_s, self._passes.each(contexts), self._drafting.each(contexts)
        sums_s = [pass_s + drafting_s for pass_s, drafting_s in zip(passes_s, after_s, strict=True)]
        return sums_s if min(sums_s) >= least_s else [max(sum_s, least_s) for sum_s in sums_s]

    def many(self, contexts: NDArray[Any]) -> Any:
        """Computes `each` for contexts that do not decrease, as an array."""
        sums_s = self._passes.many(contexts) + self._drafting.many(contexts)
        return np.maximum(sums_s, self._least_s)


class Leaps:
    """The end times of consecutive passes of the same sequences.

    seconds: the price of any shape. prices_of(num_seqs, rows, steps): those of a leap, if they are known.
    """

    def __init__(
        self,
        seconds: Callable[[IterationShape], Any],
        prices_of: Callable[[int, int, int], Prices | None] = lambda num_seqs, rows, steps: None,
    ) -> None:
        self._seconds, self._prices_of = seconds, prices_of
        self._known: dict[tuple[int, int, int], Prices] = {}

    def pass_ends(
        self, start_s: float, num_seqs: int, contexts: list[int], rows: int, steps: int
    ) -> list[float]:
        """Computes `SpeculativeModel.pass_ends`."""
        key = num_seqs, rows, steps
        return ends_of(self._known.get(key) or self._prices(key), start_s, contexts)

    def _prices(self, key: tuple[int, int, int]) -> Prices:
        if len(self._known) >= MOST_PRICES:
            self._known.clear()
        prices = self._known[key] = self._prices_of(*key) or one_by_one(self._seconds, *key)
        return prices
