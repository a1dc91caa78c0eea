"""Where a share that falls with a rate crosses its target: between two rates, then by bisection."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple

FACTOR = 2.0
MAX_STEPS = 14
"""Steps until a search for the two sides of the target gives up: a factor of 16,384."""


class Bracket(NamedTuple):
    """The target is kept at `low` (0: at no rate that was tried) and missed at `high` (inf: at none)."""

    low: float
    high: float


def bracketed(keeps: Callable[[float], bool], start: float, factor: float = FACTOR) -> Bracket:
    """Two rates, a factor apart, with the target between them."""
    if keeps(start):
        low = start
        for _ in range(MAX_STEPS):
            high = low * factor
            if not keeps(high):
                return Bracket(low, high)
            low = high
        return Bracket(low, inf)
    high = start
    for _ in range(MAX_STEPS):
        low = high / factor
        if keeps(low):
            return Bracket(low, high)
        high = low
    return Bracket(0.0, high)


def bisected(keeps: Callable[[float], bool], bracket: Bracket, precision: float) -> Bracket:
    """The same, at most a share of `precision` apart; unchanged where one side is missing."""
    low, high = bracket
    if low == 0 or high == inf:
        return bracket
    while high > low * (1 + precision):
        middle = (low * high) ** 0.5
        if keeps(middle):
            low = middle
        else:
            high = middle
    return Bracket(low, high)
