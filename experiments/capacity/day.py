"""Estimates the cost saved by scaling the replicas with the traffic of each hour.

Each hour gets the replicas of the busiest hour times its share of that hour's tokens, rounded up, plus the
spares. The estimate ignores cold starts, and that small fleets need relatively more replicas;
`scaling=scheduled` with these entries simulates both. A last hour that is not full is left out.
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
"""Longest gap between the last request and the end of its hour with which the hour still counts as full."""
LEAST_SAVED = 0.005
"""Least share of the cost that is worth mentioning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Day:
    """Replicas by hour of the workload; `fixed`: replicas without scaling."""

    replicas: Sequence[int]
    fixed: int

    @property
    def saved_share(self) -> float:
        """Share of the cost that scaling saves."""
        return 1 - sum(self.replicas) / (self.fixed * len(self.replicas))

    @property
    def overrides(self) -> str:
        """Overrides of `windtunnel simulate`, with an entry for each hour at which the number changes."""
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
    """Estimates the replicas of each hour.

    Returns None if the plan is not for the busiest hour, the traffic has fewer than two full hours, or
    scaling saves nothing.
    """
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
