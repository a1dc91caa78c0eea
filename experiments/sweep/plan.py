"""From the overrides of a sweep to its axes and points.

The same syntax as Hydra's multirun: comma-separated values, range(...), glob(...), choice(...).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sim.settings.compose import ConfigSource, value_of
from sim.settings.config_groups import find_groups
from sim.settings.convert import shown
from sim.settings.errors import ConfigError
from sim.settings.hydra_errors import COMPOSE_ERRORS, explain

MAX_RUNS = 100_000
OF_THE_SWEEP = ("launcher", "sweep", "report", "hydra")
"""Keys of the root that say how runs are made and drawn: one value each, and none of them in a run."""
MAX_CHECKED_VALUES = 20
"""Of an axis, that are built before anything runs: the first, the last, and some between them."""

_INTEGER = re.compile(r"-?(0|[1-9]\d*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """A setting that takes several values."""

    key: str
    """As it is written, without + in front."""
    overrides: tuple[str, ...]
    values: tuple[Any, ...]
    """What the overrides give it: numbers, names."""
    is_composed: bool
    """Whether its values need Hydra: choices of a group, what is added or deleted, mappings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One run of a sweep."""

    index: int
    name: str
    composed: tuple[str, ...]
    """Overrides for Hydra: many points share them."""
    edits: tuple[tuple[str, Any], ...]
    """Settings that are changed afterwards, by key."""
    overrides: tuple[str, ...]
    """All of them, as for `windtunnel simulate`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a sweep runs. alternatives: of each override, in their order; axes: those with several."""

    alternatives: tuple[tuple[str, ...], ...]
    axes: tuple[Axis, ...]

    @property
    def num_points(self) -> int:
        return math.prod(len(axis.overrides) for axis in self.axes)

    def points(self) -> Iterator[Point]:
        """Every combination; the last axis changes fastest, as in a multirun."""
        values = itertools.product(*(axis.values for axis in self.axes))
        combinations = zip(itertools.product(*self.alternatives), values, strict=True)
        edited = {o for axis in self.axes if not axis.is_composed for o in axis.overrides}
        for index, (overrides, chosen) in enumerate(combinations):
            pairs = list(zip(self.axes, chosen, strict=True))
            yield Point(
                index=index,
                name=f"run {index} ({' '.join(f'{axis.key}={shown(value)}' for axis, value in pairs)})",
                composed=tuple(o for o in overrides if o not in edited),
                edits=tuple((axis.key, value) for axis, value in pairs if not axis.is_composed),
                overrides=overrides,
            )

    def checked(self) -> list[int]:
        """Indices of points that together have every value of each axis, or enough of them."""
        strides, stride = [], 1
        for axis in reversed(self.axes):
            strides.append(stride)
            stride *= len(axis.overrides)
        found = {0}
        for axis, stride in zip(self.axes, reversed(strides), strict=True):
            found |= {stride * place for place in _spread(len(axis.overrides), MAX_CHECKED_VALUES)}
        return sorted(found)

    def to_json(self) -> dict[str, Any]:
        return {
            "alternatives": [list(of_one) for of_one in self.alternatives],
            "composed": [axis.key for axis in self.axes if axis.is_composed],
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Plan:
        """The plan that `to_json` described: the same points, whatever the config folder has become."""
        alternatives = tuple(tuple(of_one) for of_one in record["alternatives"])
        axes = tuple(_axis(of_one, record["composed"]) for of_one in alternatives if len(of_one) > 1)
        return cls(alternatives=alternatives, axes=axes)


def plan_of(overrides: Sequence[str], source: ConfigSource) -> Plan:
    """Raises ConfigError for what is no sweep, or too large a one."""
    own = [override for override in overrides if key_of(override).partition(".")[0] not in OF_THE_SWEEP]
    try:
        alternatives = source.alternatives(own)
        settled = source.alternatives([override for override in overrides if override not in own])
    except COMPOSE_ERRORS as error:
        raise explain(error, overrides, source) from error
    if alternatives is None or settled is None:
        raise ConfigError("a sweep has a list of values for each setting: write a,b,c or range(1,9,2)")
    for of_one in settled:
        if len(of_one) > 1:
            raise ConfigError(f"{key_of(of_one[0])}: must have one value, as the whole sweep has it once")
    empty = next((o for o, found in zip(own, alternatives, strict=True) if not found), None)
    if empty is not None:
        raise ConfigError(f"{empty}: no value; a glob names choices of a group: glob(*)")
    several = [of_one for of_one in alternatives if len(of_one) > 1]
    if not several:
        raise ConfigError(
            "no setting has several values; write batching=chunked,prefill_first or seed=range(0,5) "
            "(a single run: windtunnel simulate)"
        )
    num_points = math.prod(len(of_one) for of_one in several)
    if num_points > MAX_RUNS:
        raise ConfigError(f"{num_points:,} runs: must be <= {MAX_RUNS:,}; give some axis fewer values")
    keys = [key_of(of_one[0]) for of_one in alternatives]
    for of_one in several:
        _check_axis(of_one, keys)
    groups = find_groups(source.dirs)
    composed = [key for key in map(key_of, (o[0] for o in several)) if _is_composed(key, groups, keys)]
    composed += [key_of(of_one[0]) for of_one in several if _needs_hydra(of_one)]
    axes = tuple(_axis(of_one, composed) for of_one in several)
    for axis in axes:
        if len(set(map(_identity, axis.values))) < len(axis.values):
            raise ConfigError(
                f"{axis.key}={','.join(o.partition('=')[2] for o in axis.overrides)}: must be different"
            )
    return Plan(alternatives=tuple(map(tuple, alternatives)), axes=axes)


def key_of(override: str) -> str:
    """The key that an override is about, without + and ~; of a group with a package all of it."""
    return override.lstrip("+~").partition("=")[0]


def _check_axis(overrides: Sequence[str], keys: Sequence[str]) -> None:
    key = key_of(overrides[0])
    if key.partition(".")[0] == "output":
        raise ConfigError(f"{key}: no setting of a sweep; sweep.tables=true writes the tables of every run")
    if keys.count(key) > 1:
        raise ConfigError(f"{key}: is given twice; it can have several values or one")


def _is_composed(key: str, groups: Any, keys: Sequence[str]) -> bool:
    """Whether Hydra must see it: a choice, a pool's line, or what is set as a whole beside it."""
    if "@" in key or "/" in key or key in groups or key.startswith("pools."):
        return True
    return any(other.startswith(f"{key}.") or key.startswith(f"{other}.") for other in keys if other != key)


def _needs_hydra(overrides: Sequence[str]) -> bool:
    return any(o[0] in "+~" or ("{" in o and isinstance(value_of(o), dict)) for o in overrides)


def _axis(overrides: Sequence[str], composed: Sequence[str]) -> Axis:
    key = key_of(overrides[0])
    return Axis(
        key=key,
        overrides=tuple(overrides),
        values=tuple(_value(override) for override in overrides),
        is_composed=key in composed,
    )


def _value(override: str) -> Any:
    """A number, a truth value, null or a list as it is; all else as it was written."""
    text = override.partition("=")[2]
    if _INTEGER.fullmatch(text):  # Hydra's parser takes a millisecond for it, and there may be thousands
        return int(text)
    value = value_of(override)
    is_plain = value is None or isinstance(value, bool | int | float | list | str)
    return value if is_plain else text


def _identity(value: Any) -> tuple[bool, Any]:
    """The same for 1 and 1.0, another for true; it can be a member of a set."""
    return isinstance(value, bool), tuple(map(_identity, value)) if isinstance(value, list) else value


def _spread(count: int, most: int) -> list[int]:
    """Places of at most so many out of `count`, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})
