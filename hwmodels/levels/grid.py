"""Multilinear interpolation on a grid of measurements, the same to the last bit for numbers and arrays."""

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
