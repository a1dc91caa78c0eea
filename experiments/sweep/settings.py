"""How a sweep is made and drawn; what is simulated is in the rest of its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from sim.settings.build import build_as
from sim.settings.errors import suggest

FORMATS = ("html", "png", "svg")
LISTS = ("metrics", "facet", "format")


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


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportSettings:
    """The node `report` of configs/sweep.yaml."""

    metrics: tuple[str, ...] | None = None
    """Figures of summary.json by dotted key; None: those that most ask for."""
    x: str | None = None
    y: str | None = None
    """Of maps."""
    colour: str | None = None
    facet: tuple[str, ...] | None = None
    """Axes with a panel for each of their values; None: all that have no other place."""
    format: tuple[str, ...] = ("html",)

    def __post_init__(self) -> None:
        for name in self.format:
            if name not in FORMATS:
                raise ValueError(f"format={name}: no such format; {suggest(name, FORMATS)}")
        if not self.format:
            raise ValueError(f"format=[]: must name one of {', '.join(FORMATS)}")
        if self.metrics is not None and not self.metrics:
            raise ValueError("metrics=[]: must name a figure, say ttft.p99_s; null: the usual ones")
        placed = [axis for axis in (self.x, self.colour, *(self.facet or ())) if axis is not None]
        twice = next((axis for axis in placed if placed.count(axis) > 1), None)
        if twice is not None or (self.x is not None and self.x == self.y):
            raise ValueError(f"x={self.x}: {twice or self.y} can have one place only: x, colour or facet")


def build_report_settings(node: Mapping[str, Any], key: str) -> ReportSettings:
    """One text may stand for a list of one. Raises ConfigError."""
    given = {n: [v] if n in LISTS and isinstance(v, str) else v for n, v in node.items()}
    settings: ReportSettings = build_as(ReportSettings, given, key)
    return settings
