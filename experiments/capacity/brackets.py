"""How many replicas keep the SLO: fewer than `fails` never do, `keeps` do.

The smallest number is found by galloping up from what the bounds allow (1, 2, 4, ... more) and bisection.
Assumed is that more replicas never keep it worse: then it is exact.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Bracket:
    """`fails`: the largest number known not to be enough; `keeps`: the smallest known to be, or None."""

    fails: int
    most: int
    keeps: int | None = None
    _step: int = 0

    def next(self) -> int | None:
        """The number to try; None where the search has ended: found, or more than `most` are needed."""
        if self.is_found or self.is_beyond:
            return None
        if self.keeps is not None:
            return (self.fails + self.keeps) // 2
        return min(self.fails + max(1, self._step), self.most)

    def learn(self, number: int, kept: bool) -> None:
        """What a try has shown."""
        if kept:
            self.keeps = number if self.keeps is None else min(number, self.keeps)
        else:
            self.fails = max(number, self.fails)
            self._step = max(1, 2 * self._step)

    @property
    def least(self) -> int:
        """No smaller number keeps it."""
        return self.fails + 1

    @property
    def is_found(self) -> bool:
        return self.keeps is not None and self.keeps == self.fails + 1

    @property
    def is_beyond(self) -> bool:
        return self.keeps is None and self.fails >= self.most
