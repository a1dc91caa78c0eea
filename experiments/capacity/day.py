"""What a number of replicas that follows the traffic would save, against the same number all the time.

Each hour gets replicas in proportion to its tokens: as many as the busiest hour needs, times its share of
that hour's tokens, rounded up, and the spares. Cold starts are left out, and so is that smaller fleets need
relatively more: an estimate, which `scaling=scheduled` with these entries simulates. A last hour that is not
full is left out, as its tokens say nothing of an hour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from experiments.capacity.candidates import Candidate
from experiments.capacity.probe import traffic
from experiments.capacity.settings import CapacitySettings

HOUR_S = 3600
LEAST_HOURS = 2
LAST_GAP_S = 60
"""Between the last request and the end of the traffic, which requests do not tell; so much may be missing."""
LEAST_SAVED = 0.005
"""Share of the rent; less is not worth a sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Day:
    """Replicas by hour of the workload, and the share of the rent that they save."""

    replicas: Sequence[int]
    fixed: int

    @property
    def saved_share(self) -> float:
        return 1 - sum(self.replicas) / (self.fixed * len(self.replicas))

    @property
    def overrides(self) -> str:
        """Of `windtunnel simulate`, from hour to hour where the number changes."""
        changes = [
            f"{{at:'{hour:02d}:00',replicas:{count}}}"
            for hour, count in enumerate(self.replicas[:24])
            if hour == 0 or count != self.replicas[hour - 1]
        ]
        return (
            f"replicas={self.replicas[0]} scaling=scheduled scaling.max_replicas={max(self.replicas)} "
            f'"scaling.entries=[{",".join(changes)}]"'
        )


def day_of(candidate: Candidate, num_up: int, settings: CapacitySettings, seed: int) -> Day | None:
    """None where no busiest hour is planned for, in traffic of two full hours; or where nothing is saved."""
    if settings.window_s != HOUR_S:
        return None
    whole, _ = traffic(candidate.scenario, seed, None)
    num_hours = int((whole.listed[-1].at_s + LAST_GAP_S) // HOUR_S) if whole.listed else 0
    if num_hours < LEAST_HOURS:
        return None
    at_s = np.array([arrival.at_s for arrival in whole.listed])
    tokens = np.array([a.request.prompt.num_tokens + a.num_output_tokens for a in whole.listed], np.float64)
    by_hour = np.bincount((at_s // HOUR_S).astype(np.int64), weights=tokens)[:num_hours]
    window, _ = traffic(candidate.scenario, seed, settings.window_s)
    peak = sum(a.request.prompt.num_tokens + a.num_output_tokens for a in window.listed)
    least = candidate.least_up
    needed = [max(least, ceil(num_up * min(1.0, float(own) / peak) - 1e-9)) for own in by_hour]
    day = Day(
        replicas=[candidate.deployed(count, settings) for count in needed],
        fixed=candidate.deployed(num_up, settings),
    )
    return day if day.saved_share >= LEAST_SAVED else None
