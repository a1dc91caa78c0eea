"""What a batch of decodes spends on its contexts: the sum over decode operators, quick to ask again.

One number of sequences is asked about many times in a row, with contexts that grow, so the lines of each
operator (`ops.DecodeSeconds`) are worked out once for it. Those that lie below another one are left out,
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
"""A line that is above another one by this factor is above it in rounded arithmetic, too."""


class Straight(NamedTuple):
    """Where the price of a batch of decodes is one straight line for each operator, and which ones."""

    from_context: float
    """Tokens from which on it is so; infinite where it never is."""
    lines: list[tuple[float, float, float]]
    """For each operator: its calls an iteration, its fixed seconds, and its seconds a context token."""


class Decodes:
    """All decode operators of an iteration on one device, each with its calls."""

    def __init__(self, operators: Iterable[Operator]) -> None:
        self._parts: list[tuple[float, DecodeSeconds]] = []
        for operator in operators:
            assert isinstance(operator.seconds, DecodeSeconds), operator.name
            self._parts.append((operator.calls, operator.seconds))
        # Looked up, the lines of many numbers of sequences cost half of what working them out does.
        self._figures = [RowsByCount(partial(_figures, op)) for _, op in self._parts]
        self._known: dict[Any, list[tuple[float, float, Lines]]] = {}

    def seconds(self, num_seqs: float, context_tokens: float) -> float:
        """Of num_seqs sequences (numbers). 0.5 us for an operator of two lines."""
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
        """Where one line of each operator is above its others, and all with counted_s are above floor_s."""
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
        """Of each of many batches: arrays, or one of them a number."""
        seqs = np.asarray(num_seqs, dtype=np.intp)
        context = np.asarray(context_tokens, dtype=np.float64)
        total_s: Any = 0.0
        for (calls, op), figures in zip(self._parts, self._figures, strict=True):
            fixed_s, token_s = figures.of_many(seqs).reshape(-1, 2, *seqs.shape).swapaxes(0, 1)
            seen = context if op.window is None else np.minimum(context, op.window * seqs)
            total_s = total_s + calls * largest(tuple(zip(fixed_s, token_s, strict=True)), seen)
        return total_s

    def _lines(self, num_seqs: float) -> list[tuple[float, float, Lines]]:
        """Of each operator: its calls, the context that all windows together hold, its lines."""
        self._known[num_seqs] = [
            (calls, inf if op.window is None else op.window * num_seqs, _upper(op.lines(num_seqs)))
            for calls, op in self._parts
        ]
        return self._known[num_seqs]


def _figures(op: DecodeSeconds, num_seqs: Any) -> list[Any]:
    """Seconds, and seconds a context token, line by line."""
    return [figure for line in op.lines(num_seqs) for figure in line]


def _above_from(line: tuple[float, float], other: tuple[float, float]) -> float:
    """The context from which on a line is above another one by more than rounding; infinite if never."""
    below_s = BEYOND_ROUNDING * other[0] - line[0]
    gained_s = line[1] - BEYOND_ROUNDING * other[1]
    if gained_s <= 0:
        return 0.0 if gained_s == 0 and below_s <= 0 else inf
    return max(0.0, below_s / gained_s * BEYOND_ROUNDING)


def _upper(lines: Lines) -> Lines:
    """Without lines that are below (or equal to) one of the others everywhere; the steepest is the last."""
    kept: list[tuple[Any, Any]] = []
    for line in sorted(lines, reverse=True):
        if not any(line[0] <= fixed_s and line[1] <= token_s for fixed_s, token_s in kept):
            kept.append(line)
    return tuple(kept)
