"""Finds the rate at which a share that falls with the rate crosses its target: bracketing, then bisection."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple

FACTOR = 2.0
MAX_STEPS = 14
"""Steps after which bracketing gives up: a factor of 16,384."""


class Bracket(NamedTuple):
    """The target is met at `low` (0: at no tried rate) and missed at `high` (inf: at no tried rate)."""

    low: float
    high: float


def bracketed(meets: Callable[[float], bool], start: float, factor: float = FACTOR) -> Bracket:
    """Returns two rates, a factor apart, with the target between them."""
    if meets(start):
        low = start
        for _ in range(MAX_STEPS):
            high = low * factor
            if not meets(high):
                return Bracket(low, high)
            low = high
        return Bracket(low, inf)
    high = start
    for _ in range(MAX_STEPS):
        low = high / factor
        if meets(low):
            return Bracket(low, high)
        high = low
    return Bracket(0.0, high)


def bisected(meets: Callable[[float], bool], bracket: Bracket, precision: float) -> Bracket:
    """Narrows a bracket to a share of at most `precision`; unchanged if low is 0 or high is inf."""
    low, high = bracket
    if low == 0 or high == inf:
        return bracket
    while high > low * (1 + precision):
        middle = (low * high) ** 0.5
        if meets(middle):
            low = middle
        else:
            high = middle
    return Bracket(low, high)
