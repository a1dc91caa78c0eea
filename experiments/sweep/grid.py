"""A sweep's table as a grid: its axes, each with a place in the drawings, and its figures with intervals.

x: along lines and maps; colour: a line a value; facets: a panel for each combination of their values; seeds
have no place, they make the intervals.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from experiments.study.figures import Metric
from experiments.sweep.settings import ReportSettings
from sim.metrics.paired import Interval, mean_interval
from sim.settings.convert import shown
from sim.settings.errors import ConfigError, suggest

SEED = "seed"
USUAL = (
    "ttft.p99_s",
    "tpot.p99_s",
    "throughput.output_tokens_per_s",
    "goodput.share",
    "cost.usd_per_million_output_tokens",
)
MAX_COLOURS = 8
MAX_PANELS = 24
LOGARITHMIC_FROM = 8.0
"""Ratio of the largest to the smallest value from which on an axis is logarithmic."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GridAxis:
    """Values as they stand in the table, in the order in which they are drawn."""

    key: str
    values: tuple[Any, ...]

    @property
    def is_numeric(self) -> bool:
        return all(isinstance(v, int | float) and not isinstance(v, bool) for v in self.values)

    @property
    def is_logarithmic(self) -> bool:
        numbers = self.values if self.is_numeric else (0,)
        return bool(min(numbers) > 0 and max(numbers) / min(numbers) >= LOGARITHMIC_FROM)


Cell = tuple[Any, ...]
"""A value of every axis, in their order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """What is drawn. x is None for a sweep over nothing but seeds; y: of maps."""

    axes: tuple[GridAxis, ...]
    metrics: tuple[Metric, ...]
    cells: Mapping[Cell, Mapping[str, Interval]]
    """By key of the metric; only cells with a run that is done."""
    num_seeds: int
    x: GridAxis | None
    y: GridAxis | None
    colour: GridAxis | None
    facets: tuple[GridAxis, ...]
    caveats: tuple[str, ...]

    @property
    def panels(self) -> list[dict[str, Any]]:
        """The facets' values of each panel."""
        return [
            dict(zip([axis.key for axis in self.facets], values, strict=True))
            for values in itertools.product(*(axis.values for axis in self.facets))
        ]

    def at(self, chosen: Mapping[str, Any], metric: Metric) -> Interval:
        """The metric where each axis has the value of `chosen`; NaN where nothing is done."""
        cell = self.cells.get(tuple(chosen[axis.key] for axis in self.axes))
        return cell[metric.key] if cell else Interval(math.nan, math.nan, math.nan, 0)


def grid_of(
    table: pd.DataFrame, keys: Sequence[str], settings: ReportSettings, caveats: Sequence[str]
) -> Grid:
    """table: runs.parquet; keys: of the axes. Raises ConfigError for what the sweep does not have."""
    check_places(keys, settings)
    done = table[table["status"] == "done"]
    seeds = sorted(set(done[SEED])) if SEED in keys else []
    axes = tuple(_axis(done, key) for key in keys if key != SEED)
    metrics = _metrics(done, keys, settings.metrics)
    cells = {}
    names = [axis.key for axis in axes]
    for cell, rows in done.groupby(names, sort=False) if names else [((), done)]:
        cells[tuple(cell)] = {metric.key: mean_interval(rows[metric.key]) for metric in metrics}
    x, colour, facets, y = _places(axes, settings)
    found = list(caveats)
    num_panels = math.prod(len(axis.values) for axis in facets)
    if num_panels > MAX_PANELS:
        found.append(
            f"{MAX_PANELS} of {num_panels} panels are drawn; the table is complete. Set report.x and "
            "report.colour to the longest axes."
        )
    if not axes:
        found.append("Nothing to draw, as the seed is the only axis: the table has the mean over all seeds.")
    if len(seeds) < 2:
        found.append("One seed has no interval: no difference can be separated from noise. Add seed=0,1,2.")
    return Grid(
        axes=axes,
        metrics=metrics,
        cells=cells,
        num_seeds=max(1, len(seeds)),
        x=x,
        y=y,
        colour=colour,
        facets=facets,
        caveats=tuple(found),
    )


def check_places(keys: Sequence[str], settings: ReportSettings) -> None:
    """Raise ConfigError for a place that is asked for what is no axis. keys: of the axes, the seed's too."""
    axes = [key for key in keys if key != SEED]
    asked = [(name, getattr(settings, name)) for name in ("x", "y", "colour")]
    for name, key in (*asked, *(("facet", key) for key in settings.facet or ())):
        if key is not None and key not in axes:
            note = "seeds are used for the intervals; " if key == SEED else ""
            known = suggest(key, axes) if axes else "its only axis is the seed"
            raise ConfigError(f"report.{name}={key}: is not an axis of this sweep; {note}{known}")


def panel_title(chosen: Mapping[str, Any]) -> str:
    """Returns "KEY=VALUE, ..." of the values that a panel's runs have in common."""
    return ", ".join(f"{key}={shown(value)}" for key, value in chosen.items())


def _axis(done: pd.DataFrame, key: str) -> GridAxis:
    values = list(dict.fromkeys(done[key].tolist()))
    axis = GridAxis(key=key, values=tuple(values))
    return GridAxis(key=key, values=tuple(sorted(values))) if axis.is_numeric else axis


def _metrics(done: pd.DataFrame, keys: Sequence[str], asked: Sequence[str] | None) -> tuple[Metric, ...]:
    own = {"run", "status", "error", "code", *keys}
    known = [str(name) for name in done if name not in own and pd.api.types.is_numeric_dtype(done[name])]
    for name in asked or ():
        if name not in known:
            same = [one for one in known if one.startswith(f"{name.partition('.')[0]}.")] or known
            raise ConfigError(
                f"metric={name}: these runs have no such metric; {suggest(name, same, also=known)}"
            )
    found = asked or [name for name in USUAL if name in known and done[name].notna().any()]
    return tuple(Metric(key=name, better="higher") for name in found)


def _places(
    axes: Sequence[GridAxis], settings: ReportSettings
) -> tuple[GridAxis | None, GridAxis | None, tuple[GridAxis, ...], GridAxis | None]:
    """x: the numeric axis with the most values; colour: the longest other axis with few enough values."""
    by_key = {axis.key: axis for axis in axes}
    x, y, colour = (by_key[key] if key else None for key in (settings.x, settings.y, settings.colour))
    facets = [by_key[key] for key in settings.facet or ()]
    free = [axis for axis in axes if axis not in (x, colour, *facets)]
    if x is None and free:
        x = max(
            (axis for axis in free if axis != y or len(free) == 1),
            key=lambda a: (a.is_numeric, len(a.values)),
        )
        free.remove(x)
    if colour is None:
        apart = [axis for axis in free if len(axis.values) <= MAX_COLOURS]
        if apart:
            colour = max(apart, key=lambda axis: len(axis.values))
            free.remove(colour)
    if y is None:
        others = [axis for axis in axes if axis != x]
        y = colour or max(others, key=lambda axis: len(axis.values), default=None)
    return x, colour, tuple(facets + free), y
