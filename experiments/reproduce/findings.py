"""Reads `mutations.csv`: what changes of the simulator do to the rows. Written by `mutations.py`."""

from __future__ import annotations

import csv
import math
from functools import cache
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("mutations.csv")
LEAST_FACTOR = 1.1


class Finding(NamedTuple):
    """Holds what one mutation does to one row: a line of `mutations.csv`."""

    row: str
    mutation: str
    change: float
    """Ours with a factor of 1.1 over ours without, less 1; infinite: ours is a ratio to nothing."""
    falls_at: float | None
    """Smallest factor with which the row falls out of its band; None: none that was tried."""
    tried: float
    """Largest factor that was tried."""


@cache
def known() -> dict[str, tuple[Finding, ...]]:
    """Returns the findings by row."""
    found: dict[str, list[Finding]] = {}
    with FILE.open(newline="") as file:
        for line in csv.DictReader(file):
            falls_at = float(line["falls_at"]) if line["falls_at"] else None
            change, tried = float(line["change"]), float(line["tried"])
            finding = Finding(line["row"], line["mutation"], change, falls_at, tried)
            found.setdefault(finding.row, []).append(finding)
    return {row: tuple(lines) for row, lines in found.items()}


def broken_by(row: str, *, differs: bool = False) -> str:
    """Returns a sentence on the changes that break a row, or that do not; empty if none is known.

    differs: whether the row does not hold without any change.
    """
    found = known().get(row, ())
    falls = sorted((finding.falls_at, finding.mutation) for finding in found if finding.falls_at is not None)
    if falls:
        words = [f"{mutation} x {factor:g}" for factor, mutation in falls]
        return f"Falls out with {', '.join(words)}."
    if not found:
        return ""
    if any(math.isinf(finding.change) for finding in found):
        return f"Has no finite figure with a change of x {LEAST_FACTOR:g}."
    most = max(found, key=lambda finding: (finding.tried, abs(finding.change)))
    if differs:
        strongest = max(found, key=lambda finding: abs(finding.change))
        return f"Moves by {100 * strongest.change:+.1f} % with {strongest.mutation} x {LEAST_FACTOR:g}."
    return (
        f"Still holds with {most.mutation} x {most.tried:g}; x {LEAST_FACTOR:g} moves it by "
        f"{100 * most.change:+.1f} %."
    )
