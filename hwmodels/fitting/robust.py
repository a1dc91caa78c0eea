"""Tools of all fits: validation groups, robust least squares, sums of terms."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import least_squares, nnls

Floats = NDArray[np.float64]
Curve = TypeVar("Curve")


def validation_rows(columns: Mapping[str, Any], group_by: Sequence[str]) -> NDArray[np.bool_]:
    """Returns a mask of rows held out from the fit: one group in four, always the same ones.

    A group is all rows with the same values in the columns group_by (a GEMM's n and k, an attention's heads).
    """
    keys = zip(*(np.asarray(columns[name]).tolist() for name in group_by), strict=True)
    kept_back: dict[tuple[Any, ...], bool] = {}
    rows = []
    for key in keys:
        if key not in kept_back:
            kept_back[key] = zlib.crc32(repr(key).encode()) % 4 == 0
        rows.append(kept_back[key])
    return np.array(rows, dtype=np.bool_)


class Fitted(NamedTuple, Generic[Curve]):
    """A curve with fitted parameters, and how well the rows determine them."""

    curve: Curve
    cost: float
    """Half the sum of the rows' soft_l1 losses at the best minimum found."""
    undetermined: dict[str, tuple[float, float]]
    """Parameters that the rows do not determine, with the range of values that fit equally well."""

    def then(self, later: Fitted[Curve]) -> Fitted[Curve]:
        """Returns a later fit of other parameters of the curve, combined with this fit's results."""
        return Fitted(later.curve, self.cost + later.cost, {**self.undetermined, **later.undetermined})


NUM_STARTS = 6
"""Number of starts of a fit: the parameters of the given curve, and points spread over the ranges."""

SAME_COST = 0.01
"""Costs count as equal if they differ by less than this share, which means errors differ by about half of it.
"""

EXACT = 1e-4
"""Root mean square of the log errors below which the fit counts as exact: tables state about four digits."""

PROFILE_STEPS = 4
"""Number of steps in which the other parameters are refitted after one was moved."""

SCANNED = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Positions in its range to which the search moves each parameter."""

SCAN_STEPS = 6
"""Number of steps after which the search continues only if it is below the best cost so far."""

HALVINGS = 6
"""Number of bisections that find an end of a parameter's range."""

MAX_RESTARTS = 5
"""Maximum number of lower minima, found during the range search, from which the search continues."""

STEP = 1e-5
"""Step of the numerical derivatives, as a share of a parameter's range."""


def fit_curve(
    curve: Curve,
    ranges: Mapping[str, tuple[float, float]],
    predict: Callable[[Curve], Floats],
    measured: Floats,
    *,
    loss_scale: float = 0.1,
    weights: Floats | None = None,
    seed: int = 0,
) -> Fitted[Curve]:
    """Returns the curve with the parameters in these ranges that minimise log(predict / measured).

    The loss is soft_l1 with scale loss_scale (0.1: errors beyond about 10 % count linearly), times the row's
    weight. Prices are maxima of several terms, so the cost has several minima: the search starts from
    `NUM_STARTS` points in the logarithms of the parameters, then moves each parameter through its range, and
    the best minimum is used. A parameter is not determined if doubling or halving it (or moving it to the end
    of its range) does not increase the cost when the others are refitted. It keeps its value in the given
    curve if that fits equally well.

    ranges: (lower, upper) by field of the curve. seed: of the starts.
    """
    problem = _Problem(curve, ranges, predict, measured, loss_scale, weights)
    own = problem.shares_of(curve)
    starts = [own, *spread_points(NUM_STARTS - 1, len(own), seed)]
    for start in starts:
        problem.minimum(start)
    problem.scan()
    best, undetermined = problem.with_own_where_equal(own)
    for _ in range(MAX_RESTARTS):
        if problem.is_equal(best.cost):
            break
        problem.minimum(problem.least.shares)  # a moved parameter has led to a lower minimum
        best, undetermined = problem.with_own_where_equal(own)
    values = {
        name: (problem.value(index, low), problem.value(index, high))
        for index, (name, (low, high)) in enumerate(zip(ranges, undetermined, strict=True))
        if low < high
    }
    return Fitted(problem.curve_of(best.shares), best.cost, values)


def end_of(is_equal: Callable[[float], bool], inner: float, outer: float) -> float:
    """Returns the value with an equal cost that is furthest from `inner` towards `outer`, by bisection.

    is_equal: whether the cost of a value is equal; it must be true for `inner`.
    """
    if is_equal(outer):
        return outer
    for _ in range(HALVINGS):
        middle = 0.5 * (inner + outer)
        inner, outer = (middle, outer) if is_equal(middle) else (inner, middle)
    return inner


def spread_points(num: int, dimensions: int, seed: int) -> Floats:
    """Returns points of the unit cube, shape [num, dimensions]: a Latin hypercube."""
    draws = np.random.default_rng(seed)
    cells = np.stack([draws.permutation(num) for _ in range(dimensions)], axis=1)
    return np.asarray((cells + draws.random((num, dimensions))) / num)


class _Minimum(NamedTuple):
    shares: Floats
    cost: float


class _Problem(Generic[Curve]):
    """The cost of a curve as a function of shares: the position of each parameter in its range, 0 to 1.

    The scale between the bounds is logarithmic; linear if the lower bound is 0.
    """

    def __init__(
        self,
        curve: Curve,
        ranges: Mapping[str, tuple[float, float]],
        predict: Callable[[Curve], Floats],
        measured: Floats,
        loss_scale: float,
        weights: Floats | None,
    ) -> None:
        self._curve, self._names, self._predict = curve, tuple(ranges), predict
        self._lower, self._upper = np.array(list(ranges.values()), dtype=np.float64).T
        self._is_log = self._lower > 0
        self._log_measured = np.log(measured)
        self._root = np.ones_like(measured) if weights is None else np.sqrt(weights)
        self._loss_scale = loss_scale
        self.least = _Minimum(self._lower, math.inf)
        """The lowest minimum found so far."""
        self._last: tuple[bytes, Floats] = (b"", self._root)
        self._exact_cost = 0.5 * EXACT**2 * float((self._root**2).sum())

    def shares_of(self, curve: Curve) -> Floats:
        values = np.clip([getattr(curve, name) for name in self._names], self._lower, self._upper)
        floor = np.where(self._is_log, self._lower, 1.0)
        logs = np.log(np.maximum(values, floor) / floor) / np.log(np.maximum(self._upper / floor, 1 + STEP))
        linear = (values - self._lower) / (self._upper - self._lower)
        return np.asarray(np.where(self._is_log, logs, linear))

    def value(self, index: int, share: float) -> float:
        """Returns the value of a parameter at a share of its range."""
        lower, upper = self._lower[index], self._upper[index]
        at = lower * (upper / lower) ** share if self._is_log[index] else lower + share * (upper - lower)
        return float(np.clip(at, lower, upper))

    def curve_of(self, shares: Floats) -> Curve:
        values = {name: self.value(index, shares[index]) for index, name in enumerate(self._names)}
        return replace(self._curve, **values)  # type: ignore[type-var]

    def minimum(
        self, start: Floats, fixed: Mapping[int, float] = MappingProxyType({}), max_steps: int | None = None
    ) -> _Minimum:
        """Returns the nearest minimum of the cost; fixed parameters stay at the given shares."""
        shares = np.array(start)
        for index, share in fixed.items():
            shares[index] = share
        free = [index for index in range(len(shares)) if index not in fixed]
        if not free:
            return _Minimum(shares, self._cost(shares))

        def whole(moved: Floats) -> Floats:
            full = shares.copy()
            full[free] = moved
            return full

        def residuals(moved: Floats) -> Floats:
            return self._residuals(whole(moved))

        def slopes(moved: Floats) -> Floats:
            return self._slopes(whole(moved), free)

        result = least_squares(
            residuals,
            np.clip(shares[free], 1e-3, 1 - 1e-3),
            jac=slopes,
            bounds=(0.0, 1.0),
            x_scale="jac",
            loss="soft_l1",
            f_scale=self._loss_scale,
            max_nfev=max_steps,
        )
        found = _Minimum(whole(result.x), float(result.cost))
        self.least = min(self.least, found, key=lambda one: one.cost)
        return found

    def scan(self) -> None:
        """Moves each parameter of the lowest minimum through its range, and searches from there.

        A parameter that limits no row at a minimum has no slope there, but may limit rows elsewhere.
        """
        for index in range(len(self._names)):
            for share in SCANNED:
                start, least_cost = np.array(self.least.shares), self.least.cost
                start[index] = share
                moved = self.minimum(start, max_steps=SCAN_STEPS)
                if moved.cost <= least_cost:
                    self.minimum(moved.shares)

    def with_own_where_equal(self, own: Floats) -> tuple[_Minimum, list[tuple[float, float]]]:
        """Returns the lowest minimum with undetermined parameters at `own`, and all ranges.

        A range covers the shares of equal cost; a determined parameter has the same share twice.
        """
        best, most = self.least, self._equal_cost(self.least.cost)
        fixed: dict[int, float] = {}
        found = []
        for index in range(len(own)):
            low, high = self._equal_range(best.shares, index, fixed, most)
            found.append((low, high))
            if low < high and low <= own[index] <= high:
                fixed[index] = float(own[index])
                best = self.minimum(best.shares, fixed)
        return best, found

    def is_equal(self, cost: float) -> bool:
        """Returns whether the cost equals that of the lowest minimum."""
        return cost <= self._equal_cost(self.least.cost)

    def _equal_cost(self, least: float) -> float:
        return least * (1 + SAME_COST) + self._exact_cost

    def _equal_range(
        self, shares: Floats, index: int, fixed: Mapping[int, float], most: float
    ) -> tuple[float, float]:
        """Returns the range of shares of a parameter in which the cost is at most `most`.

        The other parameters are refitted, except the fixed ones.
        """

        def is_equal(share: float) -> bool:
            given = {**fixed, index: share}
            start = np.array(shares)
            for moved, value in given.items():
                start[moved] = value
            return self._cost(start) <= most or self.minimum(start, given, PROFILE_STEPS).cost <= most

        share = float(shares[index])
        far = (
            float(np.log(2) / np.log(self._upper[index] / self._lower[index]))
            if self._is_log[index]
            else 0.25
        )
        lower, upper = max(share - far, 0.0), min(share + far, 1.0)
        lower_is_equal = share - lower >= 0.1 * far and is_equal(lower)
        upper_is_equal = upper - share >= 0.1 * far and is_equal(upper)
        if not lower_is_equal and not upper_is_equal:
            return share, share
        return (
            end_of(is_equal, lower, 0.0) if lower_is_equal else end_of(is_equal, share, lower),
            end_of(is_equal, upper, 1.0) if upper_is_equal else end_of(is_equal, share, upper),
        )

    def _residuals(self, shares: Floats) -> Floats:
        key = shares.tobytes()
        if self._last[0] != key:
            log_predicted = np.log(self._predict(self.curve_of(shares)))
            self._last = key, np.asarray(self._root * (log_predicted - self._log_measured))
        return self._last[1]

    def _slopes(self, shares: Floats, free: Sequence[int]) -> Floats:
        at = self._residuals(shares)
        columns = []
        for index in free:
            moved = np.array(shares)
            step = STEP if shares[index] < 0.5 else -STEP
            moved[index] += step
            columns.append((self._residuals(moved) - at) / step)
        self._last = shares.tobytes(), at
        return np.stack(columns, axis=1)

    def _cost(self, shares: Floats) -> float:
        ratio = (self._residuals(shares) / self._loss_scale) ** 2
        return float(self._loss_scale**2 * (np.sqrt(1 + ratio) - 1).sum())


class Terms(NamedTuple):
    """Fitted coefficients, and the ranges of those that the rows do not determine."""

    values: dict[str, float]
    undetermined: dict[str, tuple[float, float]]


def fit_terms(terms: Mapping[str, ArrayLike], measured: ArrayLike, known: ArrayLike = 0.0) -> Terms:
    """Returns the coefficients >= 0 for which known + sum of coefficient x term is closest to the rows.

    The squares of relative errors are minimised, so large rows do not dominate the fit of small ones. A
    coefficient is not determined, as in `fit_curve`, if doubling or halving it does not increase the cost
    when the others are refitted (for a coefficient of 0: raising it to a quarter of its maximum). Its maximum
    is the value at which its term alone explains a row. terms: a number per row, by name of the coefficient.
    known: the part of each row that is not fitted; rows below it count as equal to it.
    """
    rows = np.asarray(measured, np.float64)
    columns = np.stack([np.broadcast_to(np.asarray(term, np.float64), rows.shape) for term in terms.values()])
    shares, target = columns / rows, np.maximum(rows - np.asarray(known, np.float64), 0.0) / rows
    best, least = _solved(shares, target)
    most = least * (1 + SAME_COST) + 0.5 * EXACT**2 * len(rows)
    ranges = {}
    for index, name in enumerate(terms):
        found = _range(shares, target, index, float(best[index]), most)
        if found is not None:
            ranges[name] = found
    return Terms(dict(zip(terms, map(float, best), strict=True)), ranges)


def _solved(shares: Floats, target: Floats) -> tuple[Floats, float]:
    """Returns the coefficients, and half the remaining sum of squares."""
    if not len(shares):
        return np.zeros(0), 0.5 * float(target @ target)
    largest = np.maximum(shares.max(axis=1), np.finfo(np.float64).tiny)  # figures of one size
    solution: Any = nnls((shares / largest[:, None]).T, target)
    return np.asarray(solution[0] / largest), 0.5 * float(solution[1]) ** 2


def _range(
    shares: Floats, target: Floats, index: int, value: float, most: float
) -> tuple[float, float] | None:
    """Returns the range of a coefficient in which the cost is at most `most`; None: it is determined."""
    own, others = shares[index], np.delete(shares, index, axis=0)
    if not own.any():
        return 0.0, float("inf")
    upper = 1.0 / float(own.max())

    def is_equal(figure: float) -> bool:
        return _solved(others, target - figure * own)[1] <= most

    higher, lower = min(2 * value if value else 0.25 * upper, upper), 0.5 * value
    higher_is_equal = higher > 1.1 * value and is_equal(higher)
    lower_is_equal = value > 0 and is_equal(lower)
    if not higher_is_equal and not lower_is_equal:
        return None
    return (
        end_of(is_equal, lower, 0.0) if lower_is_equal else end_of(is_equal, value, lower),
        end_of(is_equal, higher, upper) if higher_is_equal else end_of(is_equal, value, higher),
    )
