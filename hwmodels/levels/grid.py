"""Multilinear interpolation on a grid of measurements, the same to the last bit for numbers and arrays."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

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

    def at(self, *sizes: float) -> float:
        """Returns the value at one size per axis."""
        first, scale, weights = 0, 1.0, []
        for size, axis, stride in zip(sizes, self._lists, self._strides, strict=True):
            index = min(max(bisect_right(axis, size) - 1, 0), len(axis) - 2)
            weight = (size - axis[index]) / (axis[index + 1] - axis[index])
            weights.append(min(max(weight, 0.0), 1.0))
            scale = scale * max(size / axis[-1], 1.0)
            first += stride * index
        value: float = _blend([self._list[first + corner] for corner in self._corners], weights)
        return value * scale

    def at_many(self, *sizes: Floats | np.float64) -> Floats:
        """Returns the values at arrays of sizes, which broadcast against each other."""
        first: Any = 0
        scale: Any = 1.0
        weights = []
        for size, axis, stride in zip(sizes, self._axes, self._strides, strict=True):
            index = np.clip(np.searchsorted(axis, size, side="right") - 1, 0, len(axis) - 2)
            weight = (size - axis[index]) / (axis[index + 1] - axis[index])
            weights.append(np.minimum(np.maximum(weight, 0.0), 1.0))
            scale = scale * np.maximum(size / axis[-1], 1.0)
            first = first + stride * index
        values: Floats = _blend([self._values[first + corner] for corner in self._corners], weights) * scale
        return values


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
