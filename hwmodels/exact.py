"""Arithmetic for numbers and numpy arrays with bit-identical results.

The simulator prices a leap of many iterations as one array and must get exactly the times of single
iterations. `+ - * / //` are rounded alike for both (IEEE 754) and a maximum is one of its operands; powers,
logarithms and exponentials may differ in the last bit and are not used on this path.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import ndarray
from numpy.typing import NDArray

Num = float | int | NDArray[Any]
"""A number, or one value per iteration."""

Lines = tuple[tuple[Any, Any, Any, Any], ...]
"""Linear functions for decodes, each as (seconds, per KV token read, per query-key pair, per query row)."""


def larger(a: Any, b: Any) -> Any:
    """Returns max(a, b), elementwise if one is an array; np.maximum of two floats would take 0.5 us."""
    if type(a) is ndarray or type(b) is ndarray:
        return np.maximum(a, b)
    return a if a >= b else b


def smaller(a: Any, b: Any) -> Any:
    """Returns min(a, b), elementwise if one is an array."""
    if type(a) is ndarray or type(b) is ndarray:
        return np.minimum(a, b)
    return a if a <= b else b


def divided_up(a: Any, parts: int) -> Any:
    """Returns a / parts rounded up: the largest share of `a` items divided into `parts` parts."""
    return -(-a // parts)


def highest(lines: Lines, keys: Any, pairs: Any, rows: Any) -> Any:
    """Returns the maximum of the lines in seconds, for these KV tokens, query-key pairs and rows."""
    seconds: Any = None
    for fixed_s, key_s, pair_s, row_s in lines:
        line_s = fixed_s + key_s * keys + pair_s * pairs + row_s * rows
        seconds = line_s if seconds is None else larger(seconds, line_s)
    return seconds


def whole(count: Any) -> Any:
    """Returns counts as whole numbers."""
    if type(count) is int:
        return count
    return np.asarray(count, dtype=np.intp) if isinstance(count, ndarray) else int(count)
