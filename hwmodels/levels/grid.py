"""Multilinear interpolation on a grid of measurements, the same to the last bit for numbers and arrays.

The measurements with most axes are those of attention: decodes alone, one prompt chunk alone, and both in one
batch.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy import ndarray
from numpy.typing import NDArray

from hwmodels.exact import larger, smaller
from hwmodels.iterations.iteration import IterationShape

Floats = NDArray[np.float64]


class Grid:
    """A function of one or more sizes, given at every combination of the points of its axes.

    axes: increasing, at least two points each; values: shape [len(axis), ...] for each axis.

    Between points it is linear in each size. Below the first point of an axis it is constant, because a
    kernel of fewer rows takes as long as its smallest tile. Beyond the last point it is proportional to the
    size.
    """

    def __init__(self, axes: Sequence[Floats], values: Floats) -> None:
        assert values.shape == tuple(len(axis) for axis in axes)
        assert all(len(axis) > 1 and np.all(np.diff(axis) > 0) for axis in axes)
        self._axes = [np.asarray(axis, dtype=np.float64) for axis in axes]
        self._lists: list[list[float]] = [axis.tolist() for axis in self._axes]
        self._values = np.ascontiguousarray(values, dtype=np.float64).ravel()
        self._list: list[float] = self._values.tolist()
        self._strides = [int(np.prod(values.shape[i + 1 :])) for i in range(values.ndim)]
        # Corners of a cell, the last axis fastest: the order in which `_blend` folds them.
        self._corners = [
            sum(stride for stride, upper in zip(self._strides, uppers, strict=True) if upper)
            for uppers in itertools.product((False, True), repeat=values.ndim)
        ]

    def at(self, *sizes: Any) -> Any:
        """Returns the value at one size per axis; arrays of sizes broadcast against each other."""
        first: Any = 0
        scale: Any = 1.0
        weights = []
        for size, points, axis, stride in zip(sizes, self._axes, self._lists, self._strides, strict=True):
            last, own = len(axis) - 2, points if isinstance(size, ndarray) else axis
            if isinstance(size, ndarray):
                index: Any = np.clip(np.searchsorted(points, size, side="right") - 1, 0, last)
            else:
                index = min(max(bisect_right(axis, size) - 1, 0), last)
            weight = (size - own[index]) / (own[index + 1] - own[index])
            weights.append(smaller(larger(weight, 0.0), 1.0))
            scale = scale * larger(size / axis[-1], 1.0)
            first = first + stride * index
        values: Any = self._values if isinstance(first, ndarray) else self._list
        return _blend([values[first + corner] for corner in self._corners], weights) * scale


def _blend(corners: list[Any], weights: list[Any]) -> Any:
    """Folds the corners of a cell pair by pair, the last axis first."""
    for weight in reversed(weights):
        corners = [low + weight * (high - low) for low, high in zip(corners[::2], corners[1::2], strict=True)]
    return corners[0]


def fill_holes(axes: Sequence[Floats], values: Floats) -> Floats:
    """Fills NaN from measured neighbours on both sides, along the first axis that has them.

    The passes repeat until nothing changes: two full grids laid over each other (powers of 2, powers of 1.5)
    leave holes that need two passes. Points without neighbours stay NaN.
    """
    before = -1
    while (holes := int(np.isnan(values).sum())) not in (0, before):
        before = holes
        for dimension, axis in enumerate(axes):
            values = np.apply_along_axis(partial(_fill_line, axis), dimension, values)
    return values


def _fill_line(axis: Floats, line: Floats) -> Floats:
    """Interpolates the unknown points of a line that lie between known ones."""
    known = ~np.isnan(line)
    if known.all() or not known.any():
        return line
    return np.interp(axis, axis[known], line[known], left=np.nan, right=np.nan)


class AttentionTable:
    """Interpolates the attention of one layer, or of as many layers as the times given are for.

    The table has sequences of equal length and one chunk; an iteration has sums over sequences and chunks.
    Decodes count as that many sequences of the mean length. Chunks, T tokens in s chunks with Q query-key
    pairs, count as the cheaper of two readings, both upper bounds and equal for s = 1:

        one chunk of T tokens            after   max(Q / T - (T + 1) / 2, 0)      cached ones
        s chunks of T / s, one by one,   after   max(Q / T - (T / s + 1) / 2, 0)  each

    The first is accurate if cached tokens dominate, the second if long prompts are computed from scratch.

    An engine that computes chunks separately and masks surplus products takes the time of neither: the times
    of its chunks add up, and n new tokens after c cached ones count n (n + c) products. For all chunks
    together A = Q + (N - T) / 2, where N, the sum of n n, follows from Q if C cached tokens are spread evenly
    before them:

        s chunks of T / s, one by one,   after   A / T - T / s  each              N = 2 (Q - T C / s) - T

    What such an engine does once per call, or only slowly for the first chunk, the other chunks save.
    """

    def __init__(
        self,
        *,
        decode: Grid,
        prefill: Grid,
        mixed: Grid | None,
        chunks_apart: bool = False,
        saved_s: float = 0.0,
    ) -> None:
        """Takes grids of seconds by these sizes.

        decode(num_seqs, kv_tokens), prefill(tokens, cached), mixed(tokens, cached, num_seqs, kv_tokens).
        chunks_apart: the engine computes chunks separately; it has no `mixed`. Without `mixed`, a mixed batch
        takes the sum of both. Engines that run both in one kernel need `mixed`: they take 1.2 to 1.4 times
        the sum at the median, 4 times for 128 long decodes (vLLM 0.19, FlashAttention).
        saved_s: seconds that each chunk after the first takes less than alone, with chunks_apart.
        """
        self._decode = decode
        self._prefill = prefill
        self._mixed = mixed
        self._saved_s = saved_s
        self._chunks = self._apart if chunks_apart else self._cheaper

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the attention seconds of an iteration, or of each of many.

        If the numbers of sequences or of tokens are arrays, all fields are float arrays of one length.
        """
        fields: tuple[Any, ...] = shape.counts[:6]
        decodes, chunks = fields[0] > 0, fields[3] > 0
        prices = {(1, 0): self._of_decodes, (0, 1): self._of_chunks, (1, 1): self._of_both}
        if not isinstance(decodes, np.ndarray):
            return prices[decodes, chunks](*fields)
        seconds = np.zeros(len(decodes))
        for (has_decodes, has_chunks), price in prices.items():
            rows = (decodes == has_decodes) & (chunks == has_chunks)
            if rows.any():
                seconds[rows] = price(*(field[rows] for field in fields))
        return seconds

    def _of_decodes(self, num_seqs: Any, context: Any, *_: Any) -> Any:
        return self._decode.at(num_seqs, context / num_seqs)

    def _of_chunks(self, _: Any, __: Any, *chunks: Any) -> Any:
        return self._chunks(*chunks)[2]

    def _of_both(self, num_seqs: Any, context: Any, chunks: Any, tokens: Any, *others: Any) -> Any:
        cached, together, best = self._chunks(chunks, tokens, *others)
        if self._mixed is None:
            return best + self._decode.at(num_seqs, context / num_seqs)
        both = self._mixed.at(tokens, cached, num_seqs, context / num_seqs)
        return larger(both - (together - best), best)

    def _cheaper(self, chunks: Any, tokens: Any, pairs: Any, _: Any) -> tuple[Any, Any, Any]:
        """Returns cached tokens before the one chunk, its seconds, and the seconds of the cheaper reading."""
        cached = larger(pairs / tokens - 0.5 * (tokens + 1), 0.0)
        cached_each = larger(pairs / tokens - 0.5 * (tokens / chunks + 1), 0.0)
        together = self._prefill.at(tokens, cached)
        if not isinstance(chunks, np.ndarray) and chunks == 1:
            return cached, together, together
        return cached, together, smaller(together, chunks * self._prefill.at(tokens / chunks, cached_each))

    def _apart(self, chunks: Any, tokens: Any, pairs: Any, ends: Any) -> tuple[Any, Any, Any]:
        """Computes `_cheaper` for chunks computed separately: the one chunk's seconds are the sum of all."""
        each = tokens / chunks
        squares = 2.0 * (pairs - each * (ends - tokens)) - tokens
        squares = smaller(larger(squares, tokens * each), 1.0 * tokens * tokens)
        cached = larger((pairs + 0.5 * (squares - tokens)) / tokens - each, 0.0)
        first_s = self._prefill.at(each, cached)
        others_s = larger(first_s - self._saved_s, 0.0)
        seconds = first_s + (chunks - 1) * others_s
        return cached, seconds, seconds
