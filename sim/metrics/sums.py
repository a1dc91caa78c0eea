"""Sums with the same rounding for any number of CPU cores, and named totals of tables."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray


def weighted_sum(values: ArrayLike, weights: ArrayLike) -> float:
    """Returns the sum of values times weights; one of them may be a single number.

    `np.dot` uses BLAS, which splits more than 10,000 numbers into one part per core, so that the rounding
    depends on the machine. Its threads also wait busily: with it, computing the figures of a run of 600,000
    iterations took 0.36 s instead of 0.12 s on two cores.
    """
    return float(np.multiply(values, weights).sum())


class Totals(Protocol):
    """Named sums and maxima, to which the terms of figures are added in parts."""

    def add(self, name: str, values: NDArray[Any]) -> None:
        """Adds values to a sum; the sum of integers or booleans is an integer."""
        ...

    def raise_to(self, name: str, values: NDArray[Any]) -> None:
        """Raises a maximum to the largest of the values."""
        ...

    def merge(self, other: Any) -> None:
        """Adds the sums of another one of this kind, which is not changed, and raises the maxima."""
        ...

    def __getitem__(self, name: str) -> float:
        """Returns a sum; 0 if nothing was added."""
        ...

    def largest(self, name: str) -> float:
        """Returns a maximum; 0 if there were no values."""
        ...


class TableTotals:
    """Totals of whole tables: numpy's sums, in the order in which they are added."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._largest: dict[str, float] = {}

    def add(self, name: str, values: NDArray[Any]) -> None:
        """Adds values to a sum; the sum of integers or booleans is an integer."""
        self._sums[name] = self[name] + values.sum().item()

    def raise_to(self, name: str, values: NDArray[Any]) -> None:
        """Raises a maximum to the largest of the values."""
        if len(values):
            self._largest[name] = max(self.largest(name), values.max().item())

    def merge(self, other: TableTotals) -> None:
        """Adds the sums of other, which is not changed, and raises the maxima to its maxima."""
        for name, value in other._sums.items():
            self._sums[name] = self[name] + value
        for name in other._largest:
            self._largest[name] = max(self.largest(name), other.largest(name))

    def __getitem__(self, name: str) -> float:
        return self._sums.get(name, 0)

    def largest(self, name: str) -> float:
        """Returns a maximum; 0 if there were no values."""
        return self._largest.get(name, 0)
