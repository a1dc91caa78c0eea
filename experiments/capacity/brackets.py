"""Search for the smallest number of replicas that meets the SLO: `fails` replicas miss it, `keeps` meet it.

The number grows from the lower bound in steps of 1, 2, 4, ... until it meets the SLO, and is then bisected.
The result is exact if more replicas never do worse, which is assumed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Bracket:
    """Numbers of replicas: `fails` is the largest known to be too few, `keeps` the smallest known to suffice.

    `keeps` is None while no number is known to suffice; `most` is the largest number to try.
    """

    fails: int
    most: int
    keeps: int | None = None
    _step: int = 0

    def next(self) -> int | None:
        """Returns the number to try next; None if it is found or more than `most` are needed."""
        if self.is_found or self.is_beyond:
            return None
        if self.keeps is not None:
            return (self.fails + self.keeps) // 2
        return min(self.fails + max(1, self._step), self.most)

    def learn(self, number: int, kept: bool) -> None:
        """Records whether a number of replicas meets the SLO."""
        if kept:
            self.keeps = number if self.keeps is None else min(number, self.keeps)
        else:
            self.fails = max(number, self.fails)
            self._step = max(1, 2 * self._step)

    @property
    def least(self) -> int:
        """Lower bound of the number of replicas."""
        return self.fails + 1

    @property
    def is_found(self) -> bool:
        return self.keeps is not None and self.keeps == self.fails + 1

    @property
    def is_beyond(self) -> bool:
        return self.keeps is None and self.fails >= self.most
