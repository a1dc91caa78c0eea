"""Reads `mutations.csv`: what changes of the simulator do to the rows. Written by `mutations.py`."""

from __future__ import annotations

import csv
import math
from functools import cache
from pathlib import Path
from typing import NamedTuple

from experiments.reproduce.rows import Row

FILE = Path(__file__).with_name("mutations.csv")
LEAST_MOVE = 0.01
"""Share by which a mutation must move a row for the row to depend on what it changes."""


class Finding(NamedTuple):
    """Holds what one mutation does to one row: a line of `mutations.csv`."""

    row: str
    mutation: str
    ours: float
    worse: float
    """Ours with the quantity a tenth worse; NaN: it no longer runs; infinite: a ratio to nothing."""
    better: float | None
    """The same with it a tenth better; None: not run, as the row differs or the worse one breaks it."""

    @property
    def changes(self) -> list[float]:
        """Returns ours with each change that was run over ours without, less 1; infinite without a figure."""
        found = [self.worse, *([] if self.better is None else [self.better])]
        ratios = [value / self.ours - 1 if self.ours else math.inf for value in found]
        return [math.inf if math.isnan(ratio) else ratio for ratio in ratios]

    @property
    def most(self) -> float:
        """Returns the largest change without its sign."""
        return max(map(abs, self.changes))

    @property
    def change_text(self) -> str:
        """Returns the changes in per cent."""
        return " and ".join("none" if math.isinf(change) else f"{change:+.1%}" for change in self.changes)

    def breaks(self, row: Row) -> bool:
        """Returns whether the row holds without the mutation, and not with it in one of the directions."""
        values = [self.worse] if self.better is None else [self.worse, self.better]
        return row.holds(self.ours) and not all(row.holds(value) for value in values)


@cache
def known() -> dict[str, tuple[Finding, ...]]:
    """Returns the findings by row."""
    found: dict[str, list[Finding]] = {}
    with FILE.open(newline="") as file:
        for line in csv.DictReader(file):
            better = float(line["better"]) if line["better"] else None
            finding = Finding(
                line["row"], line["mutation"], float(line["ours"]), float(line["worse"]), better
            )
            found.setdefault(finding.row, []).append(finding)
    return {row: tuple(lines) for row, lines in found.items()}


def broken_by(row: Row) -> str:
    """Returns a sentence on the changes that break a row, or only move it; empty if none is known to."""
    found = sorted(known().get(row.name, ()), key=lambda finding: -finding.most)
    breaking = [finding.mutation for finding in found if finding.breaks(row)]
    moving = [f"{line.mutation} {_percent(line.most)}" for line in found if line.mutation not in breaking]
    words = [f"falls out with {_listed(breaking)} 10 % off"] if breaking else []
    if moving:
        words.append(
            f"{'others move it' if breaking else '10 % off moves it'} by at most: {', '.join(moving)}"
        )
    return f"{'; '.join(words)}.".capitalize() if words else ""


def _percent(change: float) -> str:
    return "to no figure" if math.isinf(change) else f"{100 * change:.1f} %"


def _listed(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
