"""Finds the rows of the table that are closest to a simulated run: its GPU, engine and kind of model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from hwmodels.trust.table import ALL_ENGINES, ALL_GPUS, ExpectedError, Level

LEAST_ROWS = 5
"""Number of measured rows below which a GPU has no figure of its own, unless more groups widened it."""


class Place(NamedTuple):
    """Where a run is in the table."""

    engine: str
    gpu: str
    architecture: str
    level: Level


def errors_at(
    table: Iterable[ExpectedError], place: Place, traffic: str, least_rows: int = LEAST_ROWS
) -> dict[str, ExpectedError]:
    """Returns the rows of a kind of traffic by figure, each the closest one to the place that there is.

    Closest are those of the engine on the GPU, then of the engine on all GPUs, then of all engines. Empty if
    no engine was compared on this kind of model and traffic. A GPU of level `relative` has no own rows.
    """
    own = [
        row
        for row in table
        if (row.traffic, row.architecture, row.level) == (traffic, place.architecture, place.level)
        and (row.rows >= least_rows or row.is_widened)
    ]
    nearest = ((place.engine, place.gpu), (place.engine, ALL_GPUS), (ALL_ENGINES, ALL_GPUS))
    found: dict[str, ExpectedError] = {}
    for key in nearest:
        found = {row.figure: row for row in own if (row.engine, row.gpu) == key} | found
    return found


def is_compared(table: Iterable[ExpectedError], place: Place) -> bool:
    """Returns whether the place's own engine was compared on this kind of model, with any traffic."""
    key = (place.engine, place.architecture, place.level)
    return any((row.engine, row.architecture, row.level) == key for row in table)
