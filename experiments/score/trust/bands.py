"""Bands of errors that hold for a new group: prediction intervals over groups, in a tree of cells.

A group is a model on a GPU with one engine profile, from one source. Its rows err alike, so 20 rows of one
group say little about the next one. What is wanted is the error that a row of a group that was never seen
does not exceed with a given probability.

- The rule is conformal prediction for two layers (Dunn, Wasserman and Ramdas, 2022; Lee, Barber and Willett,
  2023): of n exchangeable values the new one is at most the k-th with probability k / (n + 1). Rows count as
  n = sum of 1 / ((1 - r) / rows + r) over the groups, r being the intraclass correlation of their log errors:
  rows that err alike count once, unrelated ones each. Beyond n / (n + 1) the band continues as a power law,
  with the exponent between the median and the largest error, at most `STEEPEST`.
- A cell below a family has the band of the cell above it, moved towards that of its own K groups by the
  exponent K / (K + FEW); the p90 half as the median, as that of few groups is little more than their largest
  error. A cell of fewer than `FEW` groups is widened by their medians only: it is never narrower.
- The bands of a family of cells are corrected by one factor each for the median and the p90: the quantile of
  error / band over rows whose group is left out, within `MOST_CORRECTED`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

FEW = 5
"""Number of groups from which a cell has a band of its own."""
FAMILY = 4
"""Depth of the families: cells with bands of their own, corrected together with those below them."""
SHARES = (0.5, 0.9)
"""Shares of the rows of a new group that are within the two figures of a band."""
UNKNOWN_CORRELATION = 0.5
"""Intraclass correlation where it is not determined: of a single group, and of errors over their bands."""
STEEPEST = 1.0
"""Largest exponent of the power law beyond the largest error: no heavier a tail than Cauchy's."""
MOST_CORRECTED = 1.5
"""Largest factor of the correction, and the inverse of its smallest one."""
LEAST_PERCENT = 0.1
"""Errors below this one are equal: no measurement is repeated better."""

Cell = tuple[str, ...]
"""A cell by its place in the tree: (root, branch, ...); its first elements are the cells above it."""


class RowError(NamedTuple):
    """The error of one figure of one measured row."""

    cell: Cell
    """The innermost cell of the row."""
    group: Hashable
    row: str
    percent: float
    """Error in percent; its sign does not count."""


class Band(NamedTuple):
    """The errors that rows of a new group are expected not to exceed."""

    median_percent: float
    p90_percent: float
    rows: int
    """Number of measured rows in the cell."""
    groups: int
    """Number of groups in the cell."""
    basis_groups: int
    """Number of groups behind the band: those of the cell, or of the one above that it was widened from."""

    def scaled(self, factors: Any) -> Band:
        """Returns the band with its two limits multiplied; the p90 is at least the median."""
        median = float(self.median_percent * factors[0])
        p90 = float(self.p90_percent * factors[1])
        return self._replace(median_percent=median, p90_percent=max(median, p90))


class Coverage(NamedTuple):
    """Shares of left-out rows within the bands of all other groups."""

    rows: int
    groups: int
    of_rows: tuple[float, float]
    """Share of all rows within the median and the p90."""
    of_groups: tuple[float, float]
    """Mean over the groups of the shares of their rows."""


class _LeftOut(NamedTuple):
    """Rows of one group in one innermost cell, and the uncorrected limits without the group."""

    cell: Cell
    group: Hashable
    ratios: Any
    """Errors over the median and the p90, [row, 2]."""


def correlation(groups: Sequence[Any]) -> float:
    """Returns the intraclass correlation of log errors, from 0 to 1: one-way analysis of variance.

    groups: arrays of absolute errors in percent, one per group.
    """
    logs = [np.log(np.maximum(own, LEAST_PERCENT)) for own in groups]
    sizes = np.array([len(own) for own in logs], dtype=float)
    total, num = float(sizes.sum()), len(logs)
    if num < 2 or total == num:
        return UNKNOWN_CORRELATION
    means = np.array([own.mean() for own in logs])
    within = sum(float(((own - own.mean()) ** 2).sum()) for own in logs) / (total - num)
    grand = float(sizes @ means) / total
    between = float(sizes @ (means - grand) ** 2) / (num - 1)
    size = (total - float(sizes @ sizes) / total) / (num - 1)
    variance = max(0.0, (between - within) / size)
    return variance / (variance + within) if variance > 0 else 0.0


def bound(groups: Sequence[Any], share: float) -> float:
    """Returns the error that a row of a new group does not exceed with probability `share`, at least 0.5.

    groups: arrays of absolute errors in percent, one per group, at least one.
    """
    errors, weights = _sorted(groups, correlation(groups))
    errors = np.maximum(errors, LEAST_PERCENT)
    number = float(weights.sum())
    middle = float(np.interp(0.5, (np.cumsum(weights) - weights / 2) / number, errors))
    if share == 0.5:
        return middle
    reached = np.cumsum(weights) / (number + 1)
    last = float(reached[-1])
    if share <= last:
        return max(middle, float(np.interp(share, reached, errors)))
    exponent = np.log(errors[-1] / middle) / np.log(0.5 / (1 - last)) if last > 0.5 else STEEPEST
    return float(errors[-1] * ((1 - last) / (1 - share)) ** min(exponent, STEEPEST))


def _sorted(groups: Sequence[Any], alike: float) -> tuple[Any, Any]:
    """Returns all values in order, and the independent rows that each counts as. alike: see `correlation`."""
    values = np.concatenate(groups)
    weights = np.concatenate([np.full(len(own), 1 / (1 - alike + alike * len(own))) for own in groups])
    order = np.argsort(values, kind="stable")
    return values[order], weights[order]


class Tree:
    """Errors by cell, for the bands of every cell with all groups or without one."""

    def __init__(self, errors: Iterable[RowError]) -> None:
        self._errors: dict[Cell, dict[Hashable, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._rows: dict[Cell, dict[Hashable, set[str]]] = defaultdict(lambda: defaultdict(set))
        self._own: dict[tuple[Cell, Hashable], list[float]] = defaultdict(list)
        for one in errors:
            self._own[one.cell, one.group].append(abs(one.percent))
            for depth in range(1, len(one.cell) + 1):
                cell = one.cell[:depth]
                self._errors[cell][one.group].append(abs(one.percent))
                self._rows[cell][one.group].add(one.row)
        self._left_out: dict[tuple[Cell, Hashable], list[_LeftOut]] = {}

    @property
    def cells(self) -> list[Cell]:
        """All cells, those above before those below."""
        return sorted(self._errors, key=lambda cell: (len(cell), cell))

    def groups(self, cell: Cell) -> int:
        """Returns the number of groups of a cell."""
        return len(self._errors[cell]) if cell in self._errors else 0

    def band(self, cell: Cell, without: Hashable = None) -> Band | None:
        """Returns the band of a cell, or of the innermost one above it that has rows; None if none has.

        without: a group that is left out.
        """
        found = self._uncorrected(cell, (without,))
        return None if found is None else found.scaled(self._correction(self._family(cell), without))

    def coverage(self, cell: Cell) -> Coverage | None:
        """Returns the shares of a cell's rows within the bands of all other groups; None: no such bands."""
        family = self._family(cell)
        parts = [one for one in self._parts(family, None) if one.cell[: len(cell)] == cell]
        if not parts:
            return None
        inside = [one.ratios <= self._correction(family, one.group) for one in parts]
        of_rows = np.concatenate(inside).mean(axis=0)
        of_groups = np.mean([part.mean(axis=0) for part in inside], axis=0)
        groups = len({one.group for one in parts})
        rows = sum(len(self._rows[one.cell][one.group]) for one in parts)
        return Coverage(rows, groups, (of_rows[0], of_rows[1]), (of_groups[0], of_groups[1]))

    def _uncorrected(self, cell: Cell, without: tuple[Hashable, ...]) -> Band | None:
        levels = []
        for depth in range(1, len(cell) + 1):
            at = self._errors.get(cell[:depth], {})
            if own := {group: np.array(one) for group, one in at.items() if group not in without}:
                levels.append(own)
        if not levels:
            return None
        depths = range(min(FAMILY, len(levels)), 0, -1)
        first = next((depth for depth in depths if len(levels[depth - 1]) >= FEW), 1)
        arrays = list(levels[first - 1].values())
        median, p90 = (bound(arrays, share) for share in SHARES)
        found = Band(median, p90, self._num_rows(cell[:first], levels[first - 1]), len(arrays), len(arrays))
        for depth, own in enumerate(levels[first:], start=first + 1):
            found = _moved(found, list(own.values()))._replace(rows=self._num_rows(cell[:depth], own))
        return found

    def _num_rows(self, cell: Cell, groups: Iterable[Hashable]) -> int:
        return sum(len(self._rows[cell][group]) for group in groups)

    def _family(self, cell: Cell) -> Cell:
        """Returns the cell whose groups determine the correction of a cell."""
        depths = (depth for depth in range(FAMILY, 0, -1) if self.groups(cell[:depth]) >= FEW)
        return cell[: next(depths, 1)]

    def _parts(self, family: Cell, without: Hashable) -> list[_LeftOut]:
        """Returns the ratios of a family's groups, of which one is left out of all bands, too."""
        if (family, without) not in self._left_out:
            self._left_out[family, without] = list(self._each_left_out(family, without))
        return self._left_out[family, without]

    def _each_left_out(self, family: Cell, without: Hashable) -> Iterator[_LeftOut]:
        for (cell, group), errors in self._own.items():
            if cell[: len(family)] != family or group == without:
                continue
            band = self._uncorrected(cell, (group, without))
            if band is not None:
                limits = np.array([band.median_percent, band.p90_percent])
                yield _LeftOut(cell, group, np.maximum(errors, LEAST_PERCENT)[:, None] / limits)

    def _correction(self, family: Cell, without: Hashable) -> Any:
        """Returns the factors of the median and the p90 of a family; 1 where it has few groups."""
        parts = [one.ratios for one in self._parts(family, without)]
        if len(parts) < FEW:
            return np.ones(2)
        factors = []
        for column, share in enumerate(SHARES):
            ratios, weights = _sorted([one[:, column] for one in parts], UNKNOWN_CORRELATION)
            reached = (np.cumsum(weights) - weights / 2) / weights.sum()
            factors.append(np.interp(share, reached, ratios))
        return np.clip(factors, 1 / MOST_CORRECTED, MOST_CORRECTED)


def _moved(band: Band, groups: Sequence[Any]) -> Band:
    """Returns the band of a cell's groups, given the band of the cell above it."""
    weight = len(groups) / (len(groups) + FEW)
    if len(groups) < FEW:
        factor = _excess(groups, band.median_percent) ** weight
        return band.scaled((factor, factor))._replace(groups=len(groups))
    limits = np.array([bound(groups, share) for share in SHARES])
    median, p90 = (limits / band[:2]) ** weight
    moved = band.scaled((median, np.sqrt(median * p90)))
    return moved._replace(groups=len(groups), basis_groups=len(groups))


def _excess(groups: Sequence[Any], median: float) -> float:
    """Returns the factor, at least 1, by which the medians of few groups exceed the median of a band."""
    medians = [max(float(np.median(own)), LEAST_PERCENT) for own in groups]
    return max(1.0, float(np.exp(np.mean(np.log(medians)))) / max(median, LEAST_PERCENT))
