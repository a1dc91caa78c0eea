"""Reads the arrival times of a trace: numbers, dates, or format-specific values.

A clock reads the times of one pass over a file, in the order of its rows, one by one or as columns.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sim.workload.distributions import MAX_ARRIVAL_S, FloatArray

_EXPONENTS = {"seconds": 0, "milliseconds": 3, "microseconds": 6, "nanoseconds": 9}
_YEAR_2100_S = 4_102_444_800
_DIGITS = 9
"""Fractional digits of Unix times that are read in columns."""
_EXACT = 1 << 53
"""Largest integer up to which a double represents all integers."""
_LARGEST = 1 << 63
MINUTE = len("2023-11-16 18:17:")
UTC_ZONES = ("Z", "+00:00")
ZONES = re.compile(r"(?:Z|(?P<sign>[+-])(?P<hours>\d\d):?(?P<minutes>[0-5]\d))$")


class Clock(ABC):
    """Converts arrival times to seconds from the trace's zero."""

    __slots__ = ()

    @property
    def is_unix(self) -> bool:
        """Returns whether the times are integer Unix times beyond the exact range of a double."""
        return False

    @abstractmethod
    def __call__(self, found: object) -> float:
        """Returns the time of a value of the file. Raises ValueError."""

    def begins(self, found: object) -> bool:
        """Reads the first arrival of the trace unless already done; returns whether it is valid."""
        return False

    def of_column(self, times: pa.Array) -> FloatArray | None:
        """Returns the times of consecutive rows; None if they must be read one by one."""
        return None

    def take_remark(self) -> str:
        """Returns a sentence on how the times are read, once; otherwise an empty text."""
        return ""


@dataclass(slots=True)
class ArrivalClock(Clock):
    """Reads arrival times that are numbers; Unix times count from the first.

    exponent: power of ten of the format's unit, 3 for milliseconds. has_texts: whether the file has numbers
    as texts. from_first: whether Unix times count from the first arrival; False if the user sets a window in
    Unix time. The arrivals are Unix times if the first number is at least `MAX_ARRIVAL_S` in any unit,
    because no trace begins that late (in a format with microseconds the limit is 1000 times larger, because
    1e9 us are a quarter of an hour). Their unit (seconds to nanoseconds) is the largest with which the first
    one is before the year 2100. Differences are computed exactly, because a double cannot represent
    microseconds since 1970.
    """

    exponent: int = 0
    from_first: bool = True
    has_texts: bool = False
    _first: Decimal | None = None
    _unit: Decimal = field(default=Decimal(1))
    _has_begun: bool = False
    _remark: str = ""

    def __call__(self, found: object) -> float:
        """Returns the time in seconds, negative for an arrival before the first Unix time.

        Raises ValueError unless it is a finite number >= 0 and at most `MAX_ARRIVAL_S`.
        """
        if type(found) not in ((str,) if self.has_texts else (int, float)):
            raise ValueError(found)
        text = str(found)
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

    def begins(self, found: object) -> bool:
        """Reads the first arrival of the trace unless already done; returns whether it is valid."""
        try:
            if not self._has_begun:
                self(found)
        except ValueError:
            return False
        return True

    def of_column(self, times: pa.Array) -> FloatArray | None:
        """Returns the times of consecutive rows; None if they must be read one by one."""
        if times.null_count or not self.begins(times[0].as_py()):
            return None
        if self.has_texts:
            return self._of_texts(times)
        if pa.types.is_integer(times.type) or pa.types.is_float64(times.type):
            return self._of_numbers(times.to_numpy())
        return None

    def _of_texts(self, texts: pa.Array) -> FloatArray | None:
        try:
            if self._first is None:
                return self._in_range(texts.cast(pa.float64()).to_numpy() / 10**self.exponent)
            return self._since_first(texts.cast(pa.int64()).to_numpy(), 0)
        except pa.ArrowInvalid:
            return None if self._first is None else self._of_fractions(texts)

    def _of_numbers(self, numbers: npt.NDArray[np.int64] | FloatArray) -> FloatArray | None:
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
        """Returns the times; None if one is invalid."""
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


class DateClock(Clock):
    """Reads dates such as `2023-11-16 18:17:03.9799600` as seconds after the first date read.

    Date and time are divided by a space or a T. A suffix is the offset from UTC: Z, +00:00, +0200. The date
    is parsed once per minute of the trace: strptime takes ten times as long as the rest of a row and reads
    only six fractional digits. A double cannot hold seconds since 1970 with seven fractional digits.
    """

    def __init__(self) -> None:
        self._minutes_s: dict[str, float] = {}  # "2023-11-16 18:17:" -> seconds from the first row
        self._first: tuple[datetime, float] | None = None  # minute and second of the first row

    def __call__(self, found: object) -> float:
        """Returns the time in seconds. Raises ValueError for anything but a date string."""
        text = found if isinstance(found, str) else ""
        zone = ZONES.search(text, MINUTE)
        ahead_s = 0.0
        if zone is not None:
            text = text[: zone.start()]
            if zone["sign"]:
                minutes = 60 * int(zone["hours"]) + int(zone["minutes"])
                ahead_s = 60.0 * (minutes if zone["sign"] == "+" else -minutes)
        minute, second_s = text[:MINUTE], float(text[MINUTE:])
        if not 0 <= second_s < 61:  # 60 is a leap second
            raise ValueError(text)
        return self._minute_s(minute, second_s - ahead_s) + second_s - ahead_s

    def begins(self, found: object) -> bool:
        """Returns whether a value is a string, like all dates."""
        return isinstance(found, str)

    def of_column(self, texts: pa.Array) -> FloatArray | None:
        """Returns the times of consecutive rows; None if they must be read one by one."""
        if not pa.types.is_string(texts.type) or texts.null_count:
            return None
        minutes = pc.utf8_slice_codeunits(texts, 0, MINUTE).dictionary_encode()
        seconds = pc.utf8_slice_codeunits(texts, MINUTE)
        for zone in UTC_ZONES:
            has_zone = pc.ends_with(seconds, zone)
            if pc.any(has_zone).as_py():
                seconds = pc.if_else(has_zone, pc.utf8_slice_codeunits(seconds, 0, -len(zone)), seconds)
        try:
            second_s = seconds.cast(pa.float64()).to_numpy()
            if not ((second_s >= 0) & (second_s < 61)).all():
                return None
            names = minutes.dictionary.to_pylist()
            minute_s = np.array([self._minute_s(name, float(second_s[0])) for name in names])
        except (pa.ArrowInvalid, ValueError):
            return None
        times_s: FloatArray = minute_s[minutes.indices.to_numpy()] + second_s
        return times_s

    def _minute_s(self, minute: str, second_s: float) -> float:
        """Returns the seconds from the first row to a minute; the first row is at second_s of its minute."""
        minute_s = self._minutes_s.get(minute)
        if minute_s is None:
            start = datetime.strptime(minute.replace("T", " "), "%Y-%m-%d %H:%M:")
            if self._first is None:
                self._first = start, second_s
            first, first_s = self._first
            minute_s = self._minutes_s[minute] = (start - first).total_seconds() - first_s
        return minute_s


class ReadyClock(Clock):
    """Accepts times that the format has already read, in Unix seconds, one by one."""

    def __call__(self, found: object) -> float:
        """Returns the time, seconds since 1970."""
        assert isinstance(found, float), "Trace.records has read it"
        return found
