"""Finds the rows of the table that are closest to a simulated run: its GPU, engine and kind of model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from hwmodels.trust.table import ALL_GPUS, ExpectedError, Level

LEAST_ROWS = 5
"""Number of measured rows below which a GPU has no figure of its own."""


class Place(NamedTuple):
    """Where a run is in the table."""

    engine: str
    gpu: str
    architecture: str
    level: Level


def errors_at(
    table: Iterable[ExpectedError], place: Place, traffic: str, least_rows: int = LEAST_ROWS
) -> dict[str, ExpectedError]:
    """Returns the rows of a kind of traffic by figure: those of the GPU, otherwise those of all GPUs.

    Empty if the engine was never compared on this kind of model and traffic. A GPU of level `relative` has no
    rows of its own.
    """
    own = [
        row
        for row in table
        if (row.traffic, row.engine, row.architecture, row.level)
        == (traffic, place.engine, place.architecture, place.level)
        and row.rows >= least_rows
    ]
    by_gpu = {gpu: {row.figure: row for row in own if row.gpu == gpu} for gpu in (place.gpu, ALL_GPUS)}
    return by_gpu[place.gpu] or by_gpu[ALL_GPUS]
