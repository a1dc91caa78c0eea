"""A sweep's table as a grid: its axes with their roles in the drawings, and its figures with intervals.

x: the axis along lines and heat maps; colour: one line per value; facets: one panel per combination of
values; seeds have no role, they make the intervals.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pandas as pd

from experiments.study.figures import Metric
from experiments.sweep.settings import ReportSettings
from sim.metrics.confidence import Interval, mean_interval
from sim.settings.build import shown
from sim.settings.errors import ConfigError, suggest

SEED = "seed"
USUAL = (
    "ttft.p99_s",
    "tpot.p99_s",
    "throughput.output_tokens_per_s",
    "goodput.share",
    "cost.usd_per_million_output_tokens",
    "throughput.output_tokens_per_s_and_gpu",
    "per_user.p50_tokens_per_s",
)
PARETO = (
    Metric(key="per_user.p50_tokens_per_s", better="higher", label="output tokens/s per user (median)"),
    Metric(key="throughput.output_tokens_per_s_and_gpu", better="higher", label="output tokens/s per GPU"),
)
"""What each user gets, and what a GPU gives to all of them: more of one is less of the other."""
MAX_COLOURS = 8
MAX_PANELS = 24
LOGARITHMIC_FROM = 8.0
"""Ratio of the largest to the smallest value above which an axis is logarithmic."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GridAxis:
    """Values of an axis as in the table, in the order of drawing."""

    key: str
    values: tuple[Any, ...]

    def label(self, value: Any) -> str:
        """Returns a value as a text; of a mapping, such as a pair of lengths, the parts that differ."""
        return _labels(self.values).get(value, shown(value)) if isinstance(value, str) else shown(value)

    @property
    def is_numeric(self) -> bool:
        return all(isinstance(v, int | float) and not isinstance(v, bool) for v in self.values)

    @property
    def is_logarithmic(self) -> bool:
        numbers = self.values if self.is_numeric else (0,)
        return bool(min(numbers) > 0 and max(numbers) / min(numbers) >= LOGARITHMIC_FROM)


Cell = tuple[Any, ...]
"""One value per axis, in the order of the axes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """The data to draw. x: None for a sweep over seeds only; y: second axis of heat maps."""

    axes: tuple[GridAxis, ...]
    metrics: tuple[Metric, ...]
    cells: Mapping[Cell, Mapping[str, Interval]]
    """Intervals by the metric's key; only cells with a finished run."""
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
        """Returns the metric at the given values of all axes; NaN if no run is done there."""
        cell = self.cells.get(tuple(chosen[axis.key] for axis in self.axes))
        return cell[metric.key] if cell else Interval(math.nan, math.nan, math.nan, 0)


def grid_of(
    table: pd.DataFrame, keys: Sequence[str], settings: ReportSettings, caveats: Sequence[str]
) -> Grid:
    """Builds the grid. table: runs.parquet; keys: of the axes.

    Raises ConfigError for unknown axes or metrics.
    """
    check_roles(keys, settings)
    done = table[table["status"] == "done"]
    seeds = sorted(set(done[SEED])) if SEED in keys else []
    axes = tuple(_axis(done, key) for key in keys if key != SEED)
    metrics = _metrics(done, keys, settings.metrics)
    cells = {}
    same = 0
    names = [axis.key for axis in axes]
    for cell, rows in done.groupby(names, sort=False) if names else [((), done)]:
        keys_here = dict.fromkeys([*(metric.key for metric in metrics), *(one.key for one in PARETO)])
        found_here = {key: mean_interval(rows[key]) for key in keys_here if key in rows}
        if all(one.is_exact or not one.num_values for one in found_here.values()):  # one run, several times
            same += 1
            found_here = {key: one._replace(low=math.nan, high=math.nan) for key, one in found_here.items()}
        cells[tuple(cell)] = found_here
    x, colour, facets, y = _roles(axes, settings)
    found = list(caveats)
    num_panels = math.prod(len(axis.values) for axis in facets)
    if num_panels > MAX_PANELS:
        found.append(
            f"{MAX_PANELS} of {num_panels} panels are drawn; the table contains all. Set report.x and "
            "report.colour to the longest axes."
        )
    if not axes:
        found.append(
            "There is no chart, because the seed is the only axis; the table has the mean over all seeds."
        )
    if len(seeds) < 2:
        found.append(
            "There is only one seed, so there are no confidence intervals to tell differences from noise; "
            "add seed=0,1,2."
        )
    elif same:
        which = "" if same == len(cells) else f" of {same:,} of {len(cells):,} configurations"
        found.append(
            f"All seeds give the same run{which}, as those of a trace do, so that they tell nothing of its "
            "noise and there is no interval; compare and goodput take those of a trace from blocks of its "
            "requests."
        )
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


def check_roles(keys: Sequence[str], settings: ReportSettings) -> None:
    """Raises ConfigError if a setting names a key that is not an axis. keys: of all axes, also the seed."""
    axes = [key for key in keys if key != SEED]
    asked = [(name, getattr(settings, name)) for name in ("x", "y", "colour")]
    for name, key in (*asked, *(("facet", key) for key in settings.facet or ())):
        if key is not None and key not in axes:
            note = "seeds are used for the intervals; " if key == SEED else ""
            known = suggest(key, axes) if axes else "its only axis is the seed"
            raise ConfigError(f"report.{name}={key}: is not an axis of this sweep; {note}{known}")


def panel_title(axes: Sequence[GridAxis], chosen: Mapping[str, Any]) -> str:
    """Returns "KEY=VALUE, ..." of the values that a panel's runs have in common."""
    return ", ".join(f"{axis.key}={axis.label(chosen[axis.key])}" for axis in axes if axis.key in chosen)


MAX_LABEL = 32
_LEAF = re.compile(r"([\w./]+)\s*:\s*([^{},\[\]]+)")


@lru_cache(maxsize=32)
def _labels(values: tuple[Any, ...]) -> dict[str, str]:
    """Returns the labels of values that are mappings: the leaves that are not the same in all of them.

    {prompt_tokens:{value:512},output_tokens:{value:64}} and one with 2048 and 64 are 512 and 2048. Values of
    other shapes are shortened; labels that would be alike stay whole.
    """
    texts = [value for value in values if isinstance(value, str) and value.startswith("{")]
    leaves = [_LEAF.findall(text) for text in texts]
    alike = len({tuple(key for key, _ in found) for found in leaves}) == 1
    places = range(len(leaves[0]) if alike else 0)
    differing = [i for i in places if len({found[i][1].strip() for found in leaves}) > 1]
    short = [
        " / ".join(found[i][1].strip() for i in differing) if differing else f"{text[: MAX_LABEL - 1]}…"
        for text, found in zip(texts, leaves, strict=True)
    ]
    return dict(zip(texts, short if len(set(short)) == len(short) else texts, strict=True))


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


def _roles(
    axes: Sequence[GridAxis], settings: ReportSettings
) -> tuple[GridAxis | None, GridAxis | None, tuple[GridAxis, ...], GridAxis | None]:
    """Returns x, colour, facets and y: x is the longest numeric axis, colour the longest other short axis."""
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
        candidates = [axis for axis in free if len(axis.values) <= MAX_COLOURS]
        if candidates:
            colour = max(candidates, key=lambda axis: len(axis.values))
            free.remove(colour)
    if y is None:
        others = [axis for axis in axes if axis != x]
        y = colour or max(others, key=lambda axis: len(axis.values), default=None)
    return x, colour, tuple(facets + free), y
