"""Reads arrival times of a trace that are dates."""

from __future__ import annotations

from datetime import datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sim.workload.distributions import FloatArray

MINUTE = len("2023-11-16 18:17:")
ZONE = "+00:00"


class DateClock:
    """Reads `2023-11-16 18:17:03.9799600` as seconds after the first time that it reads.

    A suffix `+00:00` is allowed. The date is parsed once per minute of the trace: strptime takes ten times as
    long as the rest of a row and reads only six fractional digits. A double cannot hold seconds since 1970
    with seven fractional digits.
    """

    def __init__(self) -> None:
        self._minutes_s: dict[str, float] = {}  # "2023-11-16 18:17:" -> seconds from the first row
        self._first: tuple[datetime, float] | None = None  # minute and second of the first row

    def __call__(self, text: str) -> float:
        """Returns the time in seconds. Raises ValueError for a text that is no date."""
        minute, second_s = text[:MINUTE], float(text[MINUTE:].removesuffix(ZONE))
        if not 0 <= second_s < 61:  # 60 is a leap second
            raise ValueError(text)
        return self._minute_s(minute, second_s) + second_s

    def of_texts(self, texts: pa.Array) -> FloatArray | None:
        """Returns the times of consecutive rows; None if they must be read one by one."""
        minutes = pc.utf8_slice_codeunits(texts, 0, MINUTE).dictionary_encode()
        seconds = pc.utf8_slice_codeunits(texts, MINUTE)
        has_zone = pc.ends_with(seconds, ZONE)
        if pc.any(has_zone).as_py():
            seconds = pc.if_else(has_zone, pc.utf8_slice_codeunits(seconds, 0, -len(ZONE)), seconds)
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

    def take_remark(self) -> str:
        """Returns an empty text: dates need no remark."""
        return ""

    def _minute_s(self, minute: str, second_s: float) -> float:
        """Returns the seconds from the first row, which is at second_s if this is it, to a minute."""
        minute_s = self._minutes_s.get(minute)
        if minute_s is None:
            start = datetime.strptime(minute, "%Y-%m-%d %H:%M:")
            if self._first is None:
                self._first = start, second_s
            first, first_s = self._first
            minute_s = self._minutes_s[minute] = (start - first).total_seconds() - first_s
        return minute_s
