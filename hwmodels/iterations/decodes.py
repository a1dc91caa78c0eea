"""GPU seconds of a batch of decodes that depend on contexts: the sum over decode operators, fast to repeat.

A pass is a batch in which sequences verify draft tokens. The same number of sequences is priced many times in
a row with growing contexts, so the lines of each operator (`ops.DecodeSeconds`) are computed once per number
(and number of rows). Lines that lie below another one are left out, which changes no bit of the maximum: a
rounded sum or product never falls as its operands grow.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from math import inf
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from hwmodels.by_count import RowsByCount
from hwmodels.iterations.layout import RankBatch
from hwmodels.iterations.ops import (
    DecodeSeconds,
    Lines,
    Operator,
    PassLines,
    largest,
    largest_of_pass,
    rows_each,
)
from hwmodels.iterations.windows import seen

BEYOND_ROUNDING = 1 + 1e-9
"""A line that is above another one by this factor is also above it in rounded arithmetic."""


PassParts = list[tuple[float, int | None, PassLines]]
"""Per operator: calls per iteration, most tokens of a sequence that are seen, lines of a pass."""


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
        self._known_passes: dict[tuple[Any, Any], PassParts] = {}

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

    def batch_seconds(self, batch: RankBatch) -> float:
        """Returns the seconds of a batch of decodes (numbers), with or without draft tokens."""
        own: Any = batch
        num_seqs, context_tokens = own.decode_seqs, own.decode_context_tokens
        if own.draft_tokens:
            return self.pass_seconds(num_seqs, context_tokens, own.draft_tokens, own.draft_pairs)
        return self.seconds(num_seqs, context_tokens)

    def batch_seconds_many(self, batch: RankBatch) -> Any:
        """Computes `batch_seconds` of each of many batches."""
        num_seqs, context_tokens, tokens = batch.decode_seqs, batch.decode_context_tokens, batch.draft_tokens
        if isinstance(tokens, ndarray) or tokens:
            return self.pass_seconds_many(num_seqs, context_tokens, tokens, batch.draft_pairs)
        return self.seconds_many(num_seqs, context_tokens)

    def pass_seconds(self, num_seqs: Any, context_tokens: Any, tokens: Any, pairs: Any) -> float:
        """Returns the seconds of num_seqs sequences that verify so many draft tokens, of so many pairs."""
        lines = self.pass_lines(num_seqs, rows_each(num_seqs, tokens))
        return seconds_of_pass(lines, num_seqs, context_tokens, tokens, pairs)

    def pass_seconds_many(self, num_seqs: Any, context_tokens: Any, tokens: Any, pairs: Any) -> Any:
        """Computes `pass_seconds` of each of many batches."""
        total_s: Any = 0.0
        for calls, op in self._parts:
            total_s = total_s + calls * op.pass_seconds(num_seqs, context_tokens, tokens, pairs)
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

    def pass_lines(self, num_seqs: Any, rows: Any) -> PassParts:
        """Returns the lines of each operator for sequences with so many rows each."""
        key = num_seqs, rows
        if key not in self._known_passes:
            self._known_passes[key] = [
                (calls, op.window, _undominated(op.pass_lines(int(rows))(num_seqs)))
                for calls, op in self._parts
            ]
        return self._known_passes[key]


def seconds_of_pass(lines: PassParts, num_seqs: Any, context_tokens: Any, tokens: Any, pairs: Any) -> float:
    """Returns the seconds of a pass by the lines of its operators; takes 0.4 us for one operator."""
    rows, all_keys, all_pairs = num_seqs + tokens, context_tokens + tokens, context_tokens + pairs
    total_s = 0.0
    for calls, window, of_operator in lines:
        if window is None:
            keys, seen_pairs = all_keys, all_pairs
        else:
            keys, seen_pairs = seen(num_seqs, context_tokens, tokens, pairs, window)
        most_s = 0.0
        for fixed_s, key_s, pair_s, row_s in of_operator:
            line_s = fixed_s + key_s * keys + pair_s * seen_pairs + row_s * rows
            if line_s > most_s:
                most_s = line_s
        total_s += calls * most_s
    return total_s


def seconds_of_passes(lines: PassParts, num_seqs: int, contexts: Any, tokens: int, pairs: Any) -> Any:
    """Computes `seconds_of_pass` for arrays of contexts and pairs."""
    total_s: Any = 0.0
    for calls, window, of_operator in lines:
        keys, seen_pairs = seen(num_seqs, contexts, tokens, pairs, window)
        total_s = total_s + calls * largest_of_pass(of_operator, keys, seen_pairs, num_seqs + tokens)
    return total_s


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


def _undominated(lines: PassLines) -> PassLines:
    """Removes lines of a pass that are nowhere above one of the others."""
    kept: list[tuple[Any, ...]] = []
    for line in sorted(set(lines), reverse=True):
        if not any(all(own <= other for own, other in zip(line, above, strict=True)) for above in kept):
            kept.append(line)
    return tuple((fixed_s, key_s, pair_s, row_s) for fixed_s, key_s, pair_s, row_s in kept)
