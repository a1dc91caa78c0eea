"""Converts the overrides of a sweep to its axes and points.

The syntax is that of Hydra's multirun: comma-separated values, range(...), glob(...), choice(...).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import find_groups
from experiments.app.settings.hydra_errors import COMPOSE_ERRORS, explain
from experiments.app.settings.override import Override, about, not_about
from sim.settings.build import shown
from sim.settings.errors import ConfigError

MAX_RUNS = 100_000
OF_THE_SWEEP = ("launcher", "sweep", "report", "hydra")
"""Root keys about running and drawing the sweep: one value each, and not part of any run."""
MAX_CHECKED_VALUES = 20
"""Number of an axis's values that are checked before anything runs: the first, the last, and some between."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """A setting that takes several values."""

    key: str
    """Key as written, without a leading +."""
    overrides: tuple[str, ...]
    values: tuple[Any, ...]
    """Values of the overrides: numbers, names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One run of a sweep."""

    index: int
    name: str
    overrides: tuple[str, ...]
    """Overrides of `windtunnel simulate`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The runs of a sweep. alternatives: of each override, in order; axes: those with several values."""

    alternatives: tuple[tuple[str, ...], ...]
    axes: tuple[Axis, ...]

    @property
    def num_points(self) -> int:
        return math.prod(len(axis.overrides) for axis in self.axes)

    def points(self) -> Iterator[Point]:
        """Yields every combination; the last axis changes fastest, as in a multirun."""
        values = itertools.product(*(axis.values for axis in self.axes))
        combinations = zip(itertools.product(*self.alternatives), values, strict=True)
        for index, (overrides, chosen) in enumerate(combinations):
            pairs = zip(self.axes, chosen, strict=True)
            name = f"run {index} ({' '.join(f'{axis.key}={shown(value)}' for axis, value in pairs)})"
            yield Point(index=index, name=name, overrides=overrides)

    def checked(self) -> list[int]:
        """Returns indices of points with all values of each axis, at most MAX_CHECKED_VALUES of an axis."""
        strides, stride = [], 1
        for axis in reversed(self.axes):
            strides.append(stride)
            stride *= len(axis.overrides)
        found = {0}
        for axis, stride in zip(self.axes, reversed(strides), strict=True):
            found |= {stride * place for place in _spread(len(axis.overrides), MAX_CHECKED_VALUES)}
        return sorted(found)

    def to_json(self) -> dict[str, Any]:
        return {"alternatives": [list(of_one) for of_one in self.alternatives]}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Plan:
        """Returns the plan of `to_json`: the same points, even if the configs have changed.

        Raises KeyError, TypeError or ValueError if the record is damaged or has too many runs.
        """
        alternatives = tuple(tuple(of_one) for of_one in record["alternatives"])
        for of_one in record["alternatives"]:
            if not (isinstance(of_one, list) and of_one and all(isinstance(text, str) for text in of_one)):
                raise ValueError("alternatives: each must be a list of texts")
        num_points = math.prod(map(len, alternatives))
        if num_points > MAX_RUNS:
            raise ValueError(f"{num_points:,} runs: must be <= {MAX_RUNS:,}")
        axes = tuple(_axis(of_one) for of_one in alternatives if len(of_one) > 1)
        return cls(alternatives=alternatives, axes=axes)


def plan_of(overrides: Sequence[str], source: ConfigSource) -> Plan:
    """Builds the plan. Raises ConfigError for overrides that are not a sweep, or too large a one."""
    own = not_about(overrides, *OF_THE_SWEEP)
    try:
        alternatives = source.alternatives(own)
        settled = source.alternatives(about(overrides, *OF_THE_SWEEP))
    except COMPOSE_ERRORS as error:
        raise explain(error, overrides, source) from error
    if alternatives is None or settled is None:
        raise ConfigError("a sweep needs a list of values for each setting: write a,b,c or range(1,9,2)")
    for of_one in settled:
        if len(of_one) > 1:
            raise ConfigError(f"{_name(of_one)}: must have one value, as it applies to the whole sweep")
    empty = next((o for o, found in zip(own, alternatives, strict=True) if not found), None)
    if empty is not None:
        raise ConfigError(f"{empty}: has no value; a glob matches choices of a group, such as glob(*)")
    several = [of_one for of_one in alternatives if len(of_one) > 1]
    _check_groups(own, source)
    if not several:
        raise ConfigError(
            "no setting has several values; write batching=chunked,prefill_first or seed=range(0,5) "
            "(a single run: windtunnel simulate)"
        )
    num_points = math.prod(len(of_one) for of_one in several)
    if num_points > MAX_RUNS:
        raise ConfigError(f"{num_points:,} runs: must be <= {MAX_RUNS:,}; give an axis fewer values")
    names = list(map(_name, alternatives))
    for of_one in several:
        _check_axis(of_one, names)
    axes = tuple(map(_axis, several))
    for axis in axes:
        if len(set(map(_identity, axis.values))) < len(axis.values):
            written = ",".join(Override.parse(o).value or "" for o in axis.overrides)
            raise ConfigError(f"{axis.key}={written}: must be different values")
    return Plan(alternatives=tuple(map(tuple, alternatives)), axes=axes)


def _name(alternatives: Sequence[str]) -> str:
    """Returns the key of the alternatives, for a group with its package."""
    return Override.parse(alternatives[0]).name


def _check_groups(overrides: Sequence[str], source: ConfigSource) -> None:
    """Raises ConfigError for a group that is chosen in two places; only the last would count."""
    groups = find_groups(source.dirs)
    chosen = [one for one in map(Override.parse, overrides) if one.key in groups and not one.is_deleted]
    for one in chosen:
        values = [other.value or "" for other in chosen if other.name == one.name]
        if len(values) > 1:
            raise ConfigError(
                f"{one.name}: is given twice; give all its values once, as {one.name}={','.join(values)}"
            )


def _check_axis(overrides: Sequence[str], names: Sequence[str]) -> None:
    first = Override.parse(overrides[0])
    if first.root == "output":
        raise ConfigError(
            f"{first.name}: is not a setting of a sweep; sweep.tables=true writes the tables of every run"
        )
    if names.count(first.name) > 1:
        raise ConfigError(f"{first.name}: is given twice; give all its values once, as a,b,c")


def _axis(overrides: Sequence[str]) -> Axis:
    values = tuple(map(_value, overrides))
    return Axis(key=_name(overrides), overrides=tuple(overrides), values=values)


def _value(text: str) -> Any:
    """Returns numbers, booleans, null and lists as values, everything else as written."""
    override = Override.parse(text)
    value = override.typed_value()
    is_plain = value is None or isinstance(value, bool | int | float | list | str)
    return value if is_plain else override.value or ""


def _identity(value: Any) -> tuple[bool, Any]:
    """Returns a hashable value that is equal for 1 and 1.0 but not for true."""
    return isinstance(value, bool), tuple(map(_identity, value)) if isinstance(value, list) else value


def _spread(count: int, most: int) -> list[int]:
    """Returns at most `most` positions out of `count`, evenly spread, with the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})
