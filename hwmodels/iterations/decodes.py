"""GPU seconds of a batch of decodes that depend on contexts: the sum over decode operators, fast to repeat.

The same number of sequences is priced many times in a row with growing contexts, so the lines of each
operator (`ops.DecodeSeconds`) are computed once per number. Lines that lie below another one are left out,
which changes no bit of the maximum: a rounded sum or product never falls as its operands grow.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from math import inf
from typing import Any, NamedTuple

import numpy as np

from hwmodels.by_count import RowsByCount
from hwmodels.iterations.ops import DecodeSeconds, Lines, Operator, largest

BEYOND_ROUNDING = 1 + 1e-9
"""A line that is above another one by this factor is also above it in rounded arithmetic."""


class Straight(NamedTuple):
    """Straight-line prices of a batch of decodes, one per operator, and the contexts where they hold."""

    from_context: float
    """Context tokens from which on the price is straight; infinite if it never is."""
    lines: list[tuple[float, float, float]]
    """Per operator: calls per iteration, fixed seconds, seconds per context token."""


class Decodes:
    """Decode operators of an iteration on one device, each with its number of calls."""

    def __init__(self, operators: Iterable[Operator]) -> None:
        self._parts: list[tuple[float, DecodeSeconds]] = []
        for operator in operators:
            assert isinstance(operator.seconds, DecodeSeconds), operator.name
            self._parts.append((operator.calls, operator.seconds))
        # Looking up the lines of many numbers of sequences takes half the time of computing them.
        self._figures = [RowsByCount(partial(_figures, op)) for _, op in self._parts]
        self._known: dict[Any, list[tuple[float, float, Lines]]] = {}

    def seconds(self, num_seqs: float, context_tokens: float) -> float:
        """Returns the seconds of num_seqs sequences (numbers); takes 0.5 us for an operator of two lines."""
        total_s = 0.0
        for calls, most_tokens, lines in self._known.get(num_seqs) or self._lines(num_seqs):
            seen = context_tokens if context_tokens < most_tokens else most_tokens
            most_s = 0.0
            for fixed_s, token_s in lines:
                line_s = fixed_s + token_s * seen
                if line_s > most_s:
                    most_s = line_s
            total_s += calls * most_s
        return total_s

    def straight(self, num_seqs: float, counted_s: float, floor_s: float) -> Straight:
        """Returns the lines that dominate their operator's others and, with counted_s, exceed floor_s."""
        lines: list[tuple[float, float, float]] = []
        from_context = sum_s = sum_token_s = 0.0
        for calls, most_tokens, (*others, steepest) in self._known.get(num_seqs) or self._lines(num_seqs):
            if most_tokens < inf:
                fixed_s, token_s = largest((*others, steepest), most_tokens), 0.0
                above = [most_tokens]
            else:
                fixed_s, token_s = steepest
                above = [_above_from(steepest, other) for other in others]
            from_context = max([from_context, *above])
            lines.append((calls, fixed_s, token_s))
            sum_s, sum_token_s = sum_s + calls * fixed_s, sum_token_s + calls * token_s
        above_floor = _above_from((counted_s + sum_s, sum_token_s), (floor_s, 0.0))
        return Straight(max(from_context, above_floor), lines)

    def seconds_many(self, num_seqs: Any, context_tokens: Any) -> Any:
        """Returns the seconds of each of many batches; one of the two arguments may be a number."""
        seqs = np.asarray(num_seqs, dtype=np.intp)
        context = np.asarray(context_tokens, dtype=np.float64)
        total_s: Any = 0.0
        for (calls, op), figures in zip(self._parts, self._figures, strict=True):
            fixed_s, token_s = figures.of_many(seqs).reshape(-1, 2, *seqs.shape).swapaxes(0, 1)
            seen = context if op.window is None else np.minimum(context, op.window * seqs)
            total_s = total_s + calls * largest(tuple(zip(fixed_s, token_s, strict=True)), seen)
        return total_s

    def _lines(self, num_seqs: float) -> list[tuple[float, float, Lines]]:
        """Returns per operator: calls, the most context tokens within all windows, lines."""
        self._known[num_seqs] = [
            (calls, inf if op.window is None else op.window * num_seqs, _upper(op.lines(num_seqs)))
            for calls, op in self._parts
        ]
        return self._known[num_seqs]


def _figures(op: DecodeSeconds, num_seqs: Any) -> list[Any]:
    """Returns the lines flattened: seconds and seconds per context token, line by line."""
    return [figure for line in op.lines(num_seqs) for figure in line]


def _above_from(line: tuple[float, float], other: tuple[float, float]) -> float:
    """Returns the context from which on a line is above another by more than rounding; infinite if never."""
    below_s = BEYOND_ROUNDING * other[0] - line[0]
    gained_s = line[1] - BEYOND_ROUNDING * other[1]
    if gained_s <= 0:
        return 0.0 if gained_s == 0 and below_s <= 0 else inf
    return max(0.0, below_s / gained_s * BEYOND_ROUNDING)


def _upper(lines: Lines) -> Lines:
    """Removes lines that are nowhere above one of the others; the steepest is the last of the rest."""
    kept: list[tuple[Any, Any]] = []
    for line in sorted(lines, reverse=True):
        if not any(line[0] <= fixed_s and line[1] <= token_s for fixed_s, token_s in kept):
            kept.append(line)
    return tuple(kept)
