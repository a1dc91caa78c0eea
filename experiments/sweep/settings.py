"""How a sweep is made; what is simulated is in the rest of its config."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Unbuildable(Enum):
    """What is done about a point whose settings cannot be built."""

    refuse = "refuse"
    skip = "skip"


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepSettings:
    """The node `sweep` of configs/sweep.yaml."""

    unbuildable: Unbuildable = Unbuildable.refuse
    """refuse: nothing runs if a point that is built beforehand cannot be; skip: its row says why."""
    tables: bool = False
    """Of every run: requests, iterations, replicas, events, gaps."""
    report: bool = True
    progress: bool = True
