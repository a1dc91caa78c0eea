"""Passes of the same sequences, one after the other, with the same number of draft tokens.

Then each key is seen by a fixed number of rows. Lines of an operator that grow with the query-key pairs
therefore mostly lie below those that grow with the keys, and a pass costs as little to price as a decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hwmodels.iterations.decodes import BEYOND_ROUNDING, PassParts
from hwmodels.iterations.ops import PassLines

FEW_PASSES: Final = 40
"""Largest number of passes priced one by one: an array takes as long as 40 numbers."""

KeyLines = list[tuple[float, list[tuple[float, float]]]]
"""Per operator: calls per iteration, and lines as fixed seconds and seconds per key."""


class EqualPasses:
    """The wall times of passes that differ in their contexts only, which do not decrease.

    counted_s: GPU seconds that do not depend on contexts. floor_s, added_s: see `HostShare`. tokens: draft
    tokens of all sequences. operators: see `by_keys`.
    """

    __slots__ = (
        *("_added_s", "_counted_s", "_floor_s", "_from", "_operators", "_straight", "_to", "_tokens"),
        "few_passes",
    )

    def __init__(
        self, counted_s: float, floor_s: float, added_s: float, tokens: int, operators: KeyLines
    ) -> None:
        self._counted_s, self._floor_s, self._added_s = counted_s, floor_s, added_s
        self._tokens, self._operators = tokens, operators
        self.few_passes = FEW_PASSES
        self._straight: list[tuple[float, float, float]] = []
        """Highest line per operator at the contexts looked up last: calls, fixed seconds, those per key."""
        self._from, self._to = inf, -inf  # the contexts at which they are the highest

    def each(self, contexts: Sequence[float]) -> list[float]:
        """Returns the seconds at each number of context tokens."""
        tokens, counted_s, added_s = self._tokens, self._counted_s, self._added_s
        if self._is_straight(contexts[0], contexts[-1]) and len(self._straight) == 1:  # as nearly always
            [(calls, fixed_s, key_s)] = self._straight
            if counted_s + calls * (fixed_s + key_s * (contexts[0] + tokens)) > self._floor_s:
                return [
                    counted_s + calls * (fixed_s + key_s * (context + tokens)) + added_s
                    for context in contexts
                ]
        return [self._seconds(context) for context in contexts]

    def _seconds(self, context: float) -> float:
        keys, decodes_s = context + self._tokens, 0.0
        for calls, lines in self._operators:
            decodes_s += calls * max(fixed_s + key_s * keys for fixed_s, key_s in lines)
        return max(self._counted_s + decodes_s, self._floor_s) + self._added_s

    def many(self, contexts: NDArray[Any]) -> NDArray[np.float64]:
        """Computes `each` for an array of contexts."""
        if not self._is_straight(contexts[0], contexts[-1]):
            return np.array([self._seconds(context) for context in contexts.tolist()])
        keys = contexts + self._tokens
        times_s: NDArray[np.float64] = np.zeros(len(contexts))
        for calls, fixed_s, key_s in self._straight:
            decodes_s = key_s * keys
            decodes_s += fixed_s
            decodes_s *= calls
            times_s += decodes_s
        times_s += self._counted_s
        if times_s[0] < self._floor_s:
            np.maximum(times_s, self._floor_s, out=times_s)
        times_s += self._added_s
        return times_s

    def _is_straight(self, first: float, last: float) -> bool:
        """Returns whether each operator has a line that is the highest at all contexts, and notes it."""
        if self._from <= first and last <= self._to:
            return True
        self._look_up(first + self._tokens)
        return self._from <= first and last <= self._to

    def _look_up(self, keys: float) -> None:
        """Notes the highest lines at a number of keys, and where they are above the others by rounding."""
        self._straight, least, most = [], 0.0, inf
        for calls, lines in self._operators:
            fixed_s, key_s = highest = max(lines, key=lambda line: line[0] + line[1] * keys)
            self._straight.append((calls, fixed_s, key_s))
            for line in lines:
                if line is not highest:
                    above_s, above_key_s = (
                        fixed_s - BEYOND_ROUNDING * line[0],
                        key_s - BEYOND_ROUNDING * line[1],
                    )
                    if above_key_s > 0:
                        least = max(least, -above_s / above_key_s * BEYOND_ROUNDING)
                    elif above_s < 0:
                        least = inf
                    elif above_key_s < 0:
                        most = min(most, above_s / -above_key_s / BEYOND_ROUNDING)
        self._from, self._to = least - self._tokens, most - self._tokens


def by_keys(parts: PassParts, most_pairs: float) -> KeyLines | None:
    """Returns the lines of each operator without those of pairs, where one of keys lies above them.

    most_pairs: pairs per key, at most. None: pairs or windows matter to an operator.
    """
    operators = []
    for calls, window, lines in parts:
        kept = [line for line in lines if not _is_below(line, lines, most_pairs)]
        if window is not None or any(pair_s or row_s for _, _, pair_s, row_s in kept):
            return None
        operators.append((calls, [(float(fixed_s), float(key_s)) for fixed_s, key_s, _, _ in kept]))
    return operators


def _is_below(line: tuple[Any, ...], lines: PassLines, most_pairs: float) -> bool:
    """Returns whether a line without keys lies below one of keys, in rounded arithmetic too."""
    fixed_s, key_s, pair_s, row_s = line
    if key_s or row_s or not pair_s:
        return False
    return any(
        fixed_s <= most_s and pair_s * most_pairs * BEYOND_ROUNDING <= most_key_s and not most_pair_s
        for most_s, most_key_s, most_pair_s, _ in lines
    )
