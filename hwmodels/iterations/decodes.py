"""What a batch of decodes spends on its contexts: the sum over decode operators, quick to ask again.

One number of sequences is asked about many times in a row, with contexts that grow, so the lines of each
operator (`ops.DecodeSeconds`) are worked out once for it. Those that lie below another one are left out,
which changes no bit of the maximum: a rounded sum or product never falls as its operands grow.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from math import inf
from typing import Any

import numpy as np

from hwmodels.by_count import RowsByCount
from hwmodels.iterations.ops import DecodeSeconds, Lines, Operator, largest


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

    def seconds_of_each(self, num_seqs: float, contexts: range) -> list[float]:
        """`seconds` of some contexts, one after the other, without a call for each."""
        totals_s = [0.0] * len(contexts)
        for calls, most_tokens, lines in self._known.get(num_seqs) or self._lines(num_seqs):
            for index, context in enumerate(contexts):
                seen = context if context < most_tokens else most_tokens
                most_s = 0.0
                for fixed_s, token_s in lines:
                    line_s = fixed_s + token_s * seen
                    if line_s > most_s:
                        most_s = line_s
                totals_s[index] += calls * most_s
        return totals_s

    def leap_seconds(self, num_seqs: float, context_tokens: Any) -> Any:
        """The same number of sequences, with an array of contexts."""
        total_s: Any = 0.0
        for calls, most_tokens, lines in self._known.get(num_seqs) or self._lines(num_seqs):
            seen = context_tokens if most_tokens == inf else np.minimum(context_tokens, most_tokens)
            total_s = total_s + calls * largest(lines, seen)
        return total_s

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


def _upper(lines: Lines) -> Lines:
    """Without lines that are below (or equal to) one of the others everywhere."""
    kept: list[tuple[Any, Any]] = []
    for line in sorted(lines, reverse=True):
        if not any(line[0] <= fixed_s and line[1] <= token_s for fixed_s, token_s in kept):
            kept.append(line)
    return tuple(kept)
