"""Converts arrival times of a trace to seconds; Unix times count from the first arrival."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal

from sim.workload.checks import MAX_ARRIVAL_S

_EXPONENTS = {"seconds": 0, "milliseconds": 3, "microseconds": 6, "nanoseconds": 9}
_YEAR_2100_S = 4_102_444_800


@dataclass(slots=True)
class ArrivalClock:
    """Reads the arrivals of one pass over a trace, in the order of its rows.

    exponent: power of ten of the format's unit, 3 for milliseconds. from_first: whether Unix times count from
    the first arrival; false if the user gives a window in Unix time. The arrivals are Unix times if the
    number of the first is at least `MAX_ARRIVAL_S`, whatever the format's unit: no trace begins later. Their
    unit (seconds to nanoseconds) is the largest with which the first one is before the year 2100. Differences
    are computed exactly, because a double cannot represent microseconds since 1970.
    """

    exponent: int = 0
    from_first: bool = True
    _first: Decimal | None = None
    _unit: Decimal = field(default=Decimal(1))
    _has_begun: bool = False
    _remark: str = ""

    def __call__(self, text: str) -> float:
        """Returns the time in seconds, negative for an arrival before the first Unix time.

        Raises ValueError for a text that is not a finite number >= 0, and above `MAX_ARRIVAL_S`.
        """
        value = float(text)
        if not 0 <= value < math.inf:
            raise ValueError(text)
        if not self._has_begun:
            self._has_begun = True
            if value >= MAX_ARRIVAL_S:
                self._begin(text, value)
        if self._first is not None:
            seconds = float((Decimal(text) - self._first) * self._unit)
        else:
            seconds = value / 10**self.exponent
        if seconds > (MAX_ARRIVAL_S if self.from_first else _YEAR_2100_S):
            raise ValueError(text)
        return seconds

    def take_remark(self) -> str:
        """Returns the sentence on the unit and the start of Unix times, once; otherwise an empty text."""
        remark, self._remark = self._remark, ""
        return remark

    def _begin(self, text: str, value: float) -> None:
        fitting = [(unit, power) for unit, power in _EXPONENTS.items() if value < _YEAR_2100_S * 10**power]
        if not fitting:
            raise ValueError(text)
        unit, exponent = fitting[0]
        self._unit = Decimal(1).scaleb(-exponent)
        if not self.from_first:
            self._first = Decimal(0)
            return
        self._first = Decimal(text)
        start = datetime.fromtimestamp(int(self._first * self._unit), UTC)
        self._remark = (
            f"The arrivals are Unix times in {unit}; 0 s of the run is the first, "
            f"{start:%Y-%m-%d %H:%M:%S} UTC."
        )
