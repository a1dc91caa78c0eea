"""Converts arrival times of a trace to seconds; Unix times count from the first arrival."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sim.workload.checks import MAX_ARRIVAL_S
from sim.workload.distributions import FloatArray

_EXPONENTS = {"seconds": 0, "milliseconds": 3, "microseconds": 6, "nanoseconds": 9}
_YEAR_2100_S = 4_102_444_800
_DIGITS = 9
"""Fractional digits of Unix times that are read in columns."""
_EXACT = 1 << 53
"""Largest whole number up to which a double represents all of them."""
_LARGEST = 1 << 63


@dataclass(slots=True)
class ArrivalClock:
    """Reads the arrivals of one pass over a trace, in the order of its rows.

    exponent: power of ten of the format's unit, 3 for milliseconds. from_first: whether Unix times count from
    the first arrival; false if the user gives a window in Unix time. The arrivals are Unix times if the
    number of the first is at least `MAX_ARRIVAL_S`, whatever the format's unit: no trace begins later (in a
    format of microseconds at least 1000 times as much, as 1e9 us are a quarter of an hour). Their unit
    (seconds to nanoseconds) is the largest with which the first one is before the year 2100. Differences are
    computed exactly, because a double cannot represent microseconds since 1970.
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
            if value >= MAX_ARRIVAL_S * 10 ** max(0, self.exponent - 3):
                self._begin(text, value)
        if self._first is not None:
            seconds = float((Decimal(text) - self._first) * self._unit)
        else:
            seconds = value / 10**self.exponent
        if seconds > (MAX_ARRIVAL_S if self.from_first else _YEAR_2100_S):
            raise ValueError(text)
        return seconds

    @property
    def is_unix(self) -> bool:
        """Returns whether the arrivals are Unix times, once the first has been read."""
        return self._first is not None

    def begins(self, text: str) -> bool:
        """Reads the first arrival of the trace, unless that has been done; returns whether it is valid."""
        try:
            if not self._has_begun:
                self(text)
        except ValueError:
            return False
        return True

    def of_texts(self, texts: pa.Array) -> FloatArray | None:
        """Returns the times of consecutive rows; None if they must be read one by one."""
        if not self.begins(texts[0].as_py()):
            return None
        try:
            if self._first is None:
                return self._in_range(texts.cast(pa.float64()).to_numpy() / 10**self.exponent)
            return self._since_first(texts.cast(pa.int64()).to_numpy(), 0)
        except pa.ArrowInvalid:
            return None if self._first is None else self._of_fractions(texts)

    def of_numbers(self, numbers: npt.NDArray[np.int64] | FloatArray) -> FloatArray | None:
        """Returns the times of consecutive rows that are numbers; None if they must be read one by one."""
        if not self.begins(str(numbers[0].item())):
            return None
        if self._first is None:
            return self._in_range(numbers.astype(np.float64) / 10**self.exponent)
        return self._since_first(numbers.astype(np.int64), 0) if numbers.dtype == np.int64 else None

    def take_remark(self) -> str:
        """Returns the sentence on the unit and the start of Unix times, once; otherwise an empty text."""
        remark, self._remark = self._remark, ""
        return remark

    def _of_fractions(self, texts: pa.Array) -> FloatArray | None:
        """Returns Unix times with up to `_DIGITS` fractional digits; None if they must be read one by one."""
        try:
            decimals = texts.cast(pa.decimal128(38, _DIGITS))
        except pa.ArrowInvalid:
            return None
        words_N2 = np.frombuffer(decimals.buffers()[1], np.int64).reshape(-1, 2)  # low, high
        low_N, high_N = words_N2[decimals.offset : decimals.offset + len(decimals)].T
        return None if high_N.any() or (low_N < 0).any() else self._since_first(low_N, _DIGITS)

    def _since_first(self, times: npt.NDArray[np.int64], num_digits: int) -> FloatArray | None:
        """Returns Unix times / 10^num_digits as seconds after the first one, rounded once.

        None if a difference has more than the 53 bits of a double.
        """
        assert self._first is not None
        first = self._first.scaleb(num_digits)
        if first != int(first) or int(first) >= _LARGEST or (times < 0).any():
            return None
        ticks = times - int(first)
        if (np.abs(ticks) > _EXACT).any():
            return None
        exponent = num_digits - int(self._unit.logb())
        return self._in_range(ticks / 10**exponent, lowest_s=-math.inf)

    def _in_range(self, times_s: FloatArray, lowest_s: float = 0.0) -> FloatArray | None:
        """Returns the times; None if one is not allowed."""
        highest_s = MAX_ARRIVAL_S if self.from_first else _YEAR_2100_S
        is_right = (times_s >= lowest_s) & (times_s <= highest_s)
        return times_s if is_right.all() else None

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
