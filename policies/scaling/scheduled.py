"""Scheduled scaling: a number of replicas for each time of day, as in KEDA's cron scaler.

AWS's scheduled actions work the same way. A day has day_s seconds, so it can be compressed: with day_s=2400,
06:00 is 600 s after the beginning of the day. Replicas are requested lead_s earlier, so that they serve in
time.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Annotated

from fieldlimits import NonNegative, Positive, Unit
from policies.scaling import PoolView
from policies.scaling.bounds import Bounded

_CLOCK = re.compile(r"([01]\d|2[0-3]):([0-5]\d)")
_MINUTES = 24 * 60


@dataclass(kw_only=True, slots=True)
class Scheduled(Bounded):
    """A daily schedule. The last entry of a day is valid until the first entry of the next day."""

    entries: tuple[dict[str, str | int], ...] = ({"at": "00:00", "replicas": 1},)
    """Entries {at: HH:MM, replicas: n}, in order of time."""
    day_s: Annotated[Positive, Unit("s")] = 86_400.0
    lead_s: Annotated[NonNegative | None, Unit("s")] = 0.0
    """Time in seconds by which replicas are requested earlier; None: the pool's cold start time."""
    offset_s: Annotated[NonNegative, Unit("s")] = 0.0
    """Time of day at which the run begins, in seconds since midnight (in a day of day_s seconds)."""
    _starts_s: list[float] = field(default_factory=list, init=False, repr=False, compare=False)
    _replicas: list[int] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        Bounded.__post_init__(self)
        if self.lead_s is not None and not self.lead_s < self.day_s:
            raise ValueError(f"lead_s={self.lead_s}: must be < day_s={self.day_s} s")
        if not self.entries:
            raise ValueError("entries=[]: must have an entry, for example {at: '08:00', replicas: 4}")
        for index, entry in enumerate(self.entries):
            self._add(f"entries[{index}]", entry)

    def target(self, pool: PoolView, now: float) -> int:
        """Returns the maximum of the schedule from now until lead_s later."""
        first = now + self.offset_s
        lead_s = pool.cold_start_s if self.lead_s is None else self.lead_s
        upcoming = [
            replicas
            for start_s, replicas in zip(self._starts_s, self._replicas, strict=True)
            if (start_s - first) % self.day_s <= lead_s
        ]
        return self.bounded(max([self._at(first), *upcoming]))

    def _at(self, time_s: float) -> int:
        """Returns the replicas scheduled at a time; before a day's first entry, the last entry applies."""
        return self._replicas[bisect_right(self._starts_s, time_s % self.day_s) - 1]

    def _add(self, name: str, entry: dict[str, str | int]) -> None:
        if set(entry) != {"at", "replicas"}:
            raise ValueError(f"{name}={entry}: must have the keys at and replicas, and no others")
        clock = _CLOCK.fullmatch(str(entry["at"]))
        if clock is None:
            raise ValueError(f"{name}.at={entry['at']}: must be a time from '00:00' to '23:59', in quotes")
        replicas = entry["replicas"]
        if not isinstance(replicas, int) or not self.min_replicas <= replicas <= self.max_replicas:
            raise ValueError(
                f"{name}.replicas={replicas}: must be a whole number from min_replicas={self.min_replicas} "
                f"to max_replicas={self.max_replicas}"
            )
        start_s = (60 * int(clock[1]) + int(clock[2])) / _MINUTES * self.day_s
        if self._starts_s and start_s <= self._starts_s[-1]:
            raise ValueError(f"{name}.at={entry['at']}: must be later than the entry before it")
        self._starts_s.append(start_s)
        self._replicas.append(replicas)
