"""A sample of the points of a scatter plot that does not depend on how they were divided."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Block = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[Any], Floats]
"""Kinds, numbers, x and y of points."""
_MAX_WAITING: Final = 8192
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class Points:
    """At most `max_points` points (x, y): a tenth of them the largest y, the others chosen by their numbers.

    A point is chosen if the product of its number and a constant is among the smallest, modulo 2^64; so the
    sample is spread evenly over consecutive numbers, and samples of parts can be merged.
    """

    def __init__(self, max_points: int) -> None:
        self._num_largest = max_points // 10
        self._num_even = max_points - self._num_largest
        self._even = _no_points()
        self._largest = _no_points()

    def add(self, number: NDArray[np.int64], x: Floats, y: Floats) -> None:
        """Adds points; their numbers differ from those of all others."""
        self._take(place_of(number), x, y)

    @property
    def limits(self) -> tuple[np.uint64, float]:
        """Returns the largest place and the smallest y with which a point may still be chosen."""
        place, y = np.uint64(2**64 - 1), -np.inf
        if len(self._even[0]) == self._num_even:
            place = self._even[0][-1]
        if len(self._largest[0]) == self._num_largest:
            y = float(self._largest[2][-1])
        return place, y

    def merge(self, other: Points) -> None:
        """Adds the points of other, which is not changed."""
        for points in (other._even, other._largest):
            self._take(*points)

    def drawn(self) -> tuple[Floats, Floats]:
        """Returns x and y of the chosen points."""
        order, x, y = (np.concatenate(pair) for pair in zip(self._even, self._largest, strict=True))
        _, first = np.unique(order, return_index=True)
        return x[first], y[first]

    def _take(self, order: NDArray[np.uint64], x: Floats, y: Floats) -> None:
        self._even = _least(self._even, (order, x, y), 0, self._num_even)
        self._largest = _least(self._largest, (order, x, y), 2, self._num_largest)


class PointsByKind:
    """Samples of points of several kinds, which are added together; max_points: of each kind."""

    def __init__(self, num_kinds: int, max_points: int) -> None:
        self.kinds = [Points(max_points) for _ in range(num_kinds)]

    def add(self, blocks: Iterable[Block]) -> None:
        """Adds points in blocks of any length."""
        waiting: list[Block] = []
        places, least_y = self._limits()
        for kind, number, x, y in blocks:
            may_be_chosen = (place_of(number) <= places[kind]) | (y >= least_y[kind])
            rows = np.flatnonzero(may_be_chosen)
            waiting.append((kind[rows], number[rows], x[rows], y[rows]))
            if sum(len(block[0]) for block in waiting) > _MAX_WAITING:
                self._take(waiting)
                waiting = []
                places, least_y = self._limits()
        if waiting:
            self._take(waiting)

    def merge(self, other: PointsByKind) -> None:
        """Adds the points of other, which is not changed."""
        for mine, theirs in zip(self.kinds, other.kinds, strict=True):
            mine.merge(theirs)

    def _limits(self) -> tuple[NDArray[np.uint64], Floats]:
        """Returns `Points.limits` of all kinds."""
        places, least_y = zip(*(points.limits for points in self.kinds), strict=True)
        return np.array(places, np.uint64), np.array(least_y)

    def _take(self, blocks: Sequence[Block]) -> None:
        kind, number, x, y = (np.concatenate(each) for each in zip(*blocks, strict=True))
        for index, points in enumerate(self.kinds):
            rows = np.flatnonzero(kind == index)
            if len(rows):
                points.add(number[rows], x[rows].astype(np.float64), y[rows])


def place_of(number: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Returns the places of points in the order in which they are chosen."""
    return number.astype(np.uint64) * _FACTOR


Columns = tuple[NDArray[np.uint64], Floats, Floats]


def _no_points() -> Columns:
    return np.zeros(0, np.uint64), np.zeros(0), np.zeros(0)


def _least(kept: Columns, added: Columns, column: int, num: int) -> Columns:
    """Returns the `num` first points of both by a column, in ascending (0) or descending (2) order."""

    def key(points: Columns) -> NDArray[np.float64] | NDArray[np.uint64]:
        return -points[2] if column else points[0]

    if len(kept[0]) == num:  # most points are behind all that are kept
        added = _rows(added, np.flatnonzero(key(added) <= key(kept)[-1]))
    if len(added[0]) > 2 * num:  # a point may come twice, when samples are merged
        added = _rows(added, np.argpartition(key(added), 2 * num)[: 2 * num])
    order, x, y = (np.concatenate(pair) for pair in zip(kept, added, strict=True))
    _, first = np.unique(order, return_index=True)
    order, x, y = order[first], x[first], y[first]
    chosen = np.argsort(key((order, x, y)), kind="stable")[:num]
    return order[chosen], x[chosen], y[chosen]


def _rows(points: Columns, rows: NDArray[np.int64]) -> Columns:
    order, x, y = points
    return order[rows], x[rows], y[rows]
