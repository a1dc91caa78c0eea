"""Settings of running and drawing a sweep; the rest of its config is simulated."""

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
    """Treatment of points whose settings are invalid."""

    refuse = "refuse"
    skip = "skip"


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepSettings:
    """The node `sweep` of configs/sweep.yaml."""

    unbuildable: Unbuildable = Unbuildable.refuse
    """refuse: nothing runs if a checked point is invalid; skip: its row contains the reason."""
    tables: bool = False
    """Write tables of every run: requests, iterations, replicas, events, gaps."""
    report: bool = True
    progress: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportSettings:
    """The node `report` of configs/sweep.yaml."""

    metrics: tuple[str, ...] | None = None
    """Figures of summary.json by dotted key; None: the usual ones."""
    x: str | None = None
    y: str | None = None
    """Second axis of heat maps."""
    colour: str | None = None
    facet: tuple[str, ...] | None = None
    """Axes with one panel per value; None: all axes without another role."""
    format: tuple[str, ...] = ("html",)

    def __post_init__(self) -> None:
        for name in self.format:
            if name not in FORMATS:
                raise ValueError(f"format={name}: no such format; {suggest(name, FORMATS)}")
        if not self.format:
            raise ValueError(f"format=[]: must contain at least one of {', '.join(FORMATS)}")
        if self.metrics is not None and not self.metrics:
            raise ValueError(
                "metrics=[]: must contain at least one metric, such as ttft.p99_s, or be null "
                "for the usual ones"
            )
        placed = [axis for axis in (self.x, self.colour, *(self.facet or ())) if axis is not None]
        twice = next((axis for axis in placed if placed.count(axis) > 1), None)
        if twice is not None or (self.x is not None and self.x == self.y):
            raise ValueError(f"x={self.x}: {twice or self.y} can have only one role: x, colour or facet")


def build_report_settings(node: Mapping[str, Any], key: str) -> ReportSettings:
    """Builds the settings; a text may stand for a list of one. Raises ConfigError."""
    given = {n: [v] if n in LISTS and isinstance(v, str) else v for n, v in node.items()}
    settings: ReportSettings = build_as(ReportSettings, given, key)
    return settings
