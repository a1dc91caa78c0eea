"""GPU seconds of decodes: the sum over decode operators, and fast repeated prices by context.

A pass is a batch in which sequences verify draft tokens; a decode is a batch without draft tokens. The same
numbers of sequences and draft tokens are priced many consecutive times with growing contexts, so the lines of
each operator (`ops.DecodeSeconds`) are computed once for them. Lines that lie below another line are dropped.
This changes no bit of the maximum, because a rounded sum or product never decreases as its operands grow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from math import inf
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy import ndarray
from numpy.typing import NDArray

from hwmodels.exact import Lines, highest, larger
from hwmodels.iterations.layout import RankBatch, seen
from hwmodels.iterations.ops import DecodeSeconds, Operator, rows_each, total_seconds

BEYOND_ROUNDING = 1 + 1e-9
"""A line that exceeds another one by this factor also exceeds it in rounded arithmetic."""

FEW_CONTEXTS: Final = 48
"""Maximum number of contexts priced one by one: an array takes as long as 50 numbers."""

Parts = list[tuple[float, int | None, Lines]]
"""Per operator: calls per iteration, maximum number of attended tokens per sequence, lines."""


class Decodes:
    """Decode operators of an iteration on one device, each with its number of calls."""

    def __init__(self, operators: Iterable[Operator]) -> None:
        self._operators = list(operators)
        self._parts: list[tuple[float, DecodeSeconds]] = []
        for operator in self._operators:
            assert isinstance(operator.seconds, DecodeSeconds), operator.name
            self._parts.append((operator.calls, operator.seconds))
        self._known: dict[tuple[Any, Any], Parts] = {}

    def seconds(self, batch: RankBatch) -> Any:
        """Returns the seconds of a batch's decodes, or of each of many batches."""
        num_seqs, context, tokens = batch.decode_seqs, batch.decode_context_tokens, batch.draft_tokens
        if type(num_seqs) is ndarray or type(tokens) is ndarray:
            return total_seconds(self._operators, batch)
        rows = rows_each(num_seqs, tokens)
        parts = self._known.get((num_seqs, rows)) or self.parts(num_seqs, rows)
        return seconds_of(parts, num_seqs, context, tokens, batch.draft_pairs)

    def parts(self, num_seqs: Any, rows: int) -> Parts:
        """Returns the lines of each operator for sequences with this many rows each (numbers)."""
        key = num_seqs, rows
        if key not in self._known:
            self._known[key] = [
                (calls, op.window, _undominated(op.lines(rows, num_seqs))) for calls, op in self._parts
            ]
        return self._known[key]


def seconds_of(parts: Parts, num_seqs: Any, context_tokens: Any, tokens: Any, pairs: Any) -> Any:
    """Returns the seconds of decodes with draft tokens; contexts and draft-token pairs may be arrays."""
    rows = num_seqs + tokens
    total_s: Any = 0.0  # or an array
    all_keys, all_pairs = context_tokens + tokens, context_tokens + pairs
    for calls, window, lines in parts:
        if window is None:
            keys, seen_pairs = all_keys, all_pairs
        else:
            keys, seen_pairs = seen(num_seqs, context_tokens, tokens, pairs, window)
        total_s = total_s + calls * highest(lines, keys, seen_pairs, rows)
    return total_s


def _undominated(lines: Lines) -> Lines:
    """Returns the lines as Python numbers, without lines that never exceed all others."""
    kept: list[tuple[float, float, float, float]] = []
    for fixed_s, key_s, pair_s, row_s in sorted(set(lines), reverse=True):
        line = float(fixed_s), float(key_s), float(pair_s), float(row_s)
        if not any(all(own <= other for own, other in zip(line, above, strict=True)) for above in kept):
            kept.append(line)
    return tuple(kept)


class DecodeBatch(NamedTuple):
    """Prices of iterations that decode the same sequences with the same number of draft tokens."""

    counted_s: float
    """GPU seconds that do not depend on contexts."""
    floor_s: float
    added_s: float
    """Seconds of the host: the iteration takes max(GPU, floor_s) + added_s; see `HostShare`."""
    num_seqs: Any
    tokens: Any
    """Draft tokens of all sequences."""
    parts: Parts

    def seconds(self, context_tokens: Any, pairs: Any) -> Any:
        """Returns the wall time for contexts and query-key pairs of the draft tokens; numbers or arrays."""
        gpu_s = self.counted_s + seconds_of(self.parts, self.num_seqs, context_tokens, self.tokens, pairs)
        return larger(gpu_s, self.floor_s) + self.added_s

    def by_context(self, most_pairs: float) -> ByContext | None:
        """Returns the prices by context alone, where at most most_pairs rows attend to each key.

        With the same draft tokens for each sequence, a fixed number of rows attends to a key, so lines of
        pairs mostly lie below those of keys. Returns None if pairs or rows matter to an operator.
        """
        operators: list[KeyLines] = []
        for calls, window, lines in self.parts:
            if not self.tokens:  # as many pairs as keys
                lines = tuple((fixed_s, key_s or pair_s, 0.0, 0.0) for fixed_s, key_s, pair_s, _ in lines)
            kept = [line for line in lines if not _is_below(line, lines, most_pairs)]
            if any(pair_s or row_s for _, _, pair_s, row_s in kept):
                return None
            most_keys = inf if window is None else window * self.num_seqs + self.tokens
            operators.append((calls, most_keys, [(fixed_s, key_s) for fixed_s, key_s, _, _ in kept]))
        return ByContext(self.counted_s, self.floor_s, self.added_s, self.tokens, operators)


def _is_below(line: tuple[Any, ...], lines: Lines, most_pairs: float) -> bool:
    """Returns whether a line without keys lies below one of keys, in rounded arithmetic as well."""
    fixed_s, key_s, pair_s, row_s = line
    if key_s or row_s or not pair_s:
        return False
    return any(
        fixed_s <= most_s and pair_s * most_pairs * BEYOND_ROUNDING <= most_key_s and not most_pair_s
        for most_s, most_key_s, most_pair_s, _ in lines
    )


class Prices(Protocol):
    """Seconds by context tokens, bit-identical in both forms.

    few: the largest number of contexts for which `each` is faster.
    """

    few: int

    def each(self, contexts: Sequence[float]) -> list[float]:
        """Returns the seconds at each number of context tokens."""

    def many(self, contexts: NDArray[Any]) -> Any:
        """Computes `each` for non-decreasing contexts, as an array; equal contexts may be one number."""


class OneByOne:
    """Prices by a function of the contexts, which are a number or an array."""

    def __init__(self, seconds: Callable[[Any], Any], few: int = 6) -> None:
        self.many, self.few = seconds, few

    def each(self, contexts: Sequence[float]) -> list[float]:
        """Returns the seconds at each number of context tokens."""
        return [float(self.many(context)) for context in contexts]


def ends_of(prices: Prices, start_s: float, contexts: Sequence[int]) -> list[float]:
    """Returns the end times of consecutive iterations with these contexts, beginning at the given start."""
    if len(contexts) > prices.few:
        if isinstance(contexts, range):  # np.array(range) would take longer than the prices
            times_s = prices.many(np.arange(contexts.start, contexts.stop, contexts.step))
        else:
            times_s = prices.many(np.array(contexts))
        if type(times_s) is not ndarray:
            times_s = np.full(len(contexts), times_s)
        times_s[0] += start_s
        ends_s: list[float] = times_s.cumsum().tolist()
        return ends_s
    each_s = prices.each(contexts)
    each_s[0] += start_s
    return list(accumulate(each_s))


KeyLines = tuple[float, float, list[tuple[float, float]]]
"""Per operator: calls per iteration, maximum number of keys read, lines (seconds, seconds per key)."""


Straight = tuple[float, float, float]
"""Per operator: calls per iteration, fixed seconds, seconds per key."""


class ByContext:
    """The wall times of iterations that differ only in their contexts, which do not decrease.

    counted_s: GPU seconds that do not depend on contexts. floor_s, added_s: see `HostShare`. tokens: draft
    tokens of all sequences.
    """

    __slots__ = (
        *("_added_s", "_counted_s", "_floor_s", "_from", "_operators", "_straight", "_to", "_tokens"),
        "few",
    )

    def __init__(
        self, counted_s: float, floor_s: float, added_s: float, tokens: int, operators: list[KeyLines]
    ) -> None:
        self._counted_s, self._floor_s, self._added_s = counted_s, floor_s, added_s
        self._tokens, self._operators = tokens, operators
        self.few = FEW_CONTEXTS
        self._straight: list[Straight] = []
        """Highest line per operator at the last looked-up contexts."""
        self._from, self._to = inf, -inf  # the contexts at which they are the highest

    def each(self, contexts: Sequence[float]) -> list[float]:
        """Returns the seconds at each number of context tokens."""
        tokens, counted_s, added_s = self._tokens, self._counted_s, self._added_s
        first, last, floor_s, straight = contexts[0], contexts[-1], self._floor_s, self._straight
        if not (self._from <= first and last <= self._to):
            straight = self._straight_at(first, last)
        if len(straight) == 1:  # as nearly always
            [(calls, fixed_s, key_s)] = straight
            if counted_s + calls * (fixed_s + key_s * (first + tokens)) > floor_s:
                return [
                    counted_s + calls * (fixed_s + key_s * (context + tokens)) + added_s
                    for context in contexts
                ]
        last_s = self._seconds(last)
        if last_s == floor_s + added_s:  # no iteration takes longer than the last
            return [last_s] * len(contexts)
        if not straight:
            return [self._seconds(context) for context in contexts]
        times_s = []
        for context in contexts:
            decodes_s, keys = 0.0, context + tokens
            for calls, fixed_s, key_s in straight:
                decodes_s += calls * (fixed_s + key_s * keys)
            times_s.append(max(counted_s + decodes_s, floor_s) + added_s)
        return times_s

    def _seconds(self, context: float) -> float:
        decodes_s, all_keys = 0.0, context + self._tokens
        for calls, most_keys, lines in self._operators:
            keys = all_keys if all_keys < most_keys else most_keys
            decodes_s += calls * max([fixed_s + key_s * keys for fixed_s, key_s in lines])
        return max(self._counted_s + decodes_s, self._floor_s) + self._added_s

    def many(self, contexts: NDArray[Any]) -> NDArray[np.float64]:
        """Computes `each` for an array of contexts."""
        straight = self._straight_at(contexts[0], contexts[-1])
        if not straight:
            return np.array(self.each(contexts.tolist()))
        keys = contexts + self._tokens
        times_s: NDArray[np.float64] = np.zeros(len(contexts))
        for calls, fixed_s, key_s in straight:
            decodes_s = key_s * keys
            decodes_s += fixed_s
            decodes_s *= calls
            times_s += decodes_s
        times_s += self._counted_s
        if times_s[0] < self._floor_s:
            np.maximum(times_s, self._floor_s, out=times_s)
        times_s += self._added_s
        return times_s

    def _straight_at(self, first: float, last: float) -> list[Straight]:
        """Returns the line of each operator that is the highest at all contexts; empty if there is none."""
        if not (self._from <= first and last <= self._to):
            self._look_up(first + self._tokens)
        return self._straight if self._from <= first and last <= self._to else []

    def _look_up(self, keys: float) -> None:
        """Stores the highest lines at a number of keys, and whether they exceed others only by rounding."""
        self._straight, least, most = [], 0.0, inf
        for calls, most_keys, lines in self._operators:
            if keys >= most_keys:  # all sequences fill the window
                longest_s = max(fixed_s + key_s * most_keys for fixed_s, key_s in lines)
                self._straight.append((calls, longest_s, 0.0))
                least = max(least, most_keys)
                continue
            fixed_s, key_s = above = max(lines, key=lambda line: line[0] + line[1] * keys)
            self._straight.append((calls, fixed_s, key_s))
            most = min(most, most_keys)
            for line in lines:
                if line is not above:
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
