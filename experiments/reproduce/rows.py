"""Defines the rows of the gallery: a published figure, its source, and how ours is obtained."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from sim.report.numbers import number

TOLERANCE = 0.05
"""Relative distance from the published figure up to which a row holds, unless the row has its own.

By so much do two careful measurements of one system differ, and figures of two digits from what was measured.
"""
EXACT = 0.02
"""The same for rows that are plain arithmetic: published figures are rounded to two or three digits."""
CLOSE = 0.25
"""Relative distance of rows that differ, but not by much."""
UNVERIFIED = "Cause not verified."

Shown = Literal["value", "percent", "times", "times less", "% less"]


class Kind(Enum):
    """Says what a row that holds is evidence of. Only rows of the first kind are advertised.

    `mutations.csv`, which a run writes, tells the first two apart.
    """

    SIMULATED = "simulated"
    """A run or price of the simulator. If it holds, a change of the simulator by a tenth breaks it."""
    INDICATIVE = "indicative"
    """The same, but no such change breaks it: a range was published, or the changes cancel in a ratio."""
    COMPUTED = "computed"
    """A formula of this tool, or figures that were put in."""
    FITTED = "fitted"
    """A constant or a setting was chosen by the published figure, or an input that decides it is assumed."""


@dataclass(frozen=True, slots=True)
class Source:
    """Names the text that a figure was published in."""

    text: str
    """Authors or publisher, title, place in the text."""
    url: str = ""
    was_read: bool = False
    """Whether the figure was checked in the text; otherwise it is quoted from memory or second-hand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Direct:
    """Obtains our figure from a function that takes milliseconds: a formula, or prices of iterations."""

    function: Callable[[], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Searched:
    """Obtains our figure from a module-level function that simulates in a worker; its result is kept."""

    function: Callable[[], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """Obtains our figure from a module-level function that simulates in a worker, once for each seed."""

    function: Callable[[int], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """Takes our figure from an arm of a comparison of `configs/experiment`, or its ratio to another arm."""

    experiment: str
    metric: str
    """Dotted key of the figure in summary.json."""
    arm: str
    over: str | None = None
    """Arm that the figure is divided by; None for the figure itself."""
    at: Any = None
    """Value that is swept."""
    over_at: Any = None
    """Swept value of `over`; None: the same."""
    shown: Shown = "times"
    """Form of the figure: value; percent (100 times it); times (the ratio); times less; % less."""

    def __post_init__(self) -> None:
        if (self.over is None) != (self.shown in ("value", "percent")):
            raise ValueError(f"over={self.over}: shown={self.shown} needs the opposite")


Ours = Direct | Searched | Sampled | Compared


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Holds one claim: what was published in which text, our setting, and how far ours may be from it."""

    name: str
    """Name on the command line, different from those of all other rows and families."""
    kind: Kind
    claim: str
    published: tuple[float, float]
    """Least and largest published value; the bounds may be 0 and infinite."""
    unit: str
    source: Source
    setting: str
    """Setting of ours, in a few words."""
    ours: Ours
    tolerance: float = TOLERANCE
    """Relative distance from the published values up to which the row holds."""
    band: tuple[float, float] | None = None
    """Values of ours with which the row holds; None: by the tolerance."""
    differs: bool = False
    """Whether the row is known not to hold; it then does not change the exit code."""
    why: str = ""
    """What is known of the difference, or why the row has its own band."""
    verified: bool = False
    """Whether a run, arithmetic or the text shows that `why` is the cause; else the output says so."""

    def __post_init__(self) -> None:
        low, high = self.published
        if not 0 <= low <= high:
            raise ValueError(f"{self.name}: published={self.published}: must be two values >= 0 in order")
        if (self.verified or self.band) and not self.why:
            raise ValueError(f"{self.name}: a verified cause or a band of a row's own needs a sentence: why")

    @property
    def limits(self) -> tuple[float, float]:
        """Returns the least and the largest value of ours with which the row holds."""
        low, high = self.published
        return self.band or ((1 - self.tolerance) * low, (1 + self.tolerance) * high)

    def holds(self, value: float) -> bool:
        """Returns whether a value of ours is within the limits; NaN and infinity are not."""
        if not math.isfinite(value):
            return False
        low, high = self.limits
        slack = 1e-9 * abs(value)  # it absorbs rounding errors: 3.0 of 4.0 is not below 0.75
        return low - slack <= value <= high + slack

    @property
    def published_text(self) -> str:
        """Returns the published figure with its unit."""
        low, high = self.published
        if low == high:
            return self.with_unit(figure(low))
        if math.isinf(high):
            return self.with_unit(f"more than {figure(low)}")
        if low == 0:
            return self.with_unit(f"less than {figure(high)}")
        return self.with_unit(f"{figure(low)} to {figure(high)}")

    def with_unit(self, text: str) -> str:
        """Returns a figure with the unit: $ stands in front."""
        return f"${text}" if self.unit == "$" else f"{text} {self.unit}".strip()

    def ratio(self, value: float) -> float:
        """Returns ours over the published figure, or over the nearest bound; 1 between the bounds."""
        low, high = self.published
        if low <= value <= high:
            return 1.0
        return value / (low if value < low else high)


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Groups the rows on one subject."""

    name: str
    title: str
    rows: tuple[Row, ...]


def figure(value: float) -> str:
    """Formats a figure with up to four digits, without zeros at the end: 5.556, 0.28, 524,288, 60."""
    return number(value) if abs(value) >= 1000 else f"{value:.4g}"
