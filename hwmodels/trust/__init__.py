"""Expected errors of simulated metrics, and their measurements."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import NamedTuple

PATH = Path(__file__).with_name("expected_errors.csv")
COLUMNS = (
    "traffic",
    "figure",
    "engine",
    "gpu",
    "architecture",
    "level",
    "rows",
    "groups",
    "median_percent",
    "p90_percent",
    "basis_groups",
)
OLD_COLUMNS = COLUMNS[:-1]
"""Columns of a table of plain percentiles, each based on its own groups."""
RATIO = "throughput ratio"
"""Ratio of the throughputs of two configurations of one model, GPU and engine, instead of one throughput."""
HELD_BACK = "TTFT p99 held back"
"""TTFT p99 of runs in which requests waited for a sequence slot or KV memory; TTFT p99 covers all others.

Whether more than 1 % of the requests wait depends on the seed and a few percent of load, and so does the p99.
"""

LORA = "throughput kept with LoRA"
"""Speed of a run with adapters, relative to a run without adapters."""

TRAFFIC = {
    "closed": ("TTFT", "TPOT", "E2E", "throughput", RATIO),
    "open": ("TTFT", "ITL", "E2E", "TTFT p99", HELD_BACK, "E2E p99"),
    "burst": ("TTFT", "TPOT", "E2E", "throughput", "TTFT p99"),
    "lora": (LORA,),
}
"""Kind of traffic -> its metrics. closed: a fixed number of clients; open: arrivals at a rate; burst: all
requests together; lora: pairs of runs with and without LoRA adapters.
"""

ARCHITECTURES = ("dense", "moe")
ALL_GPUS = ALL_ENGINES = "*"


class Level(Enum):
    """Knowledge of the GPU with which compared rows were simulated."""

    measured = "measured"
    """The GPU's own operators were measured."""
    relative = "relative"
    """Another GPU's operators were measured and scaled by the data sheet, as for an unmeasured GPU."""


class ExpectedError(NamedTuple):
    """Absolute percentage errors of one metric for a new group: a kind of run that was never compared.

    `windtunnel score --update-trust` writes the table of them. Every error comes from rows that were held out
    when the host times of the engine profiles were fitted, so it contains no measured value. The rows closest
    to a simulated run are found by its GPU, engine and kind of model.
    """

    traffic: str
    figure: str
    engine: str
    """Family of the engine, as `EngineProfile.family`, or `ALL_ENGINES`."""
    gpu: str
    """Name of the device, or `ALL_GPUS`."""
    architecture: str
    """Architecture of the models: dense or moe (mixtures of experts)."""
    level: Level
    rows: int
    """Number of measured configurations."""
    groups: int
    """Number of their groups: a model on a GPU with one engine profile, from one source."""
    median_percent: float
    """Median error of the rows of a new group."""
    p90_percent: float
    """p90 error of the rows of a new group."""
    basis_groups: int = 0
    """Number of groups whose band was widened to these errors, if `groups` are too few; 0: `groups`."""

    @property
    def is_widened(self) -> bool:
        """True if the errors come from more groups than the row's own."""
        return self.basis_groups > self.groups


@lru_cache(maxsize=1)
def shipped() -> tuple[ExpectedError, ...]:
    """Returns the table that the project ships with."""
    return read(PATH.read_text(encoding="utf-8"), PATH)


def written(rows: Iterable[ExpectedError]) -> str:
    """Returns the table as CSV, errors with three digits."""
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        percents = [f"{value:.3g}" for value in (row.median_percent, row.p90_percent)]
        cells = [cell.value if isinstance(cell, Level) else cell for cell in row[:8]]
        writer.writerow([*cells, *percents, row.basis_groups or row.groups])
    return out.getvalue()


def read(text: str, path: Path) -> tuple[ExpectedError, ...]:
    """Parses a table. Raises ValueError with its path, line, column and value where it is wrong."""
    lines = list(csv.reader(StringIO(text)))
    columns = tuple(lines[0]) if lines else ()
    if columns not in (COLUMNS, OLD_COLUMNS):
        raise ValueError(
            f"{path}: line 1: columns {','.join(columns)}: must be {','.join(COLUMNS)}; {_REMEDY}"
        )
    rows = [_row(columns, cells, f"{path}: line {i}") for i, cells in enumerate(lines[1:], start=2)]
    seen = set()
    for number, row in enumerate(rows, start=2):
        if (key := row[:6]) in seen:
            raise ValueError(f"{path}: line {number}: {','.join(map(str, key[:5]))} occurs twice; {_REMEDY}")
        seen.add(key)
    return tuple(rows)


_REMEDY = "write the table again with windtunnel score --update-trust"


def _row(columns: Sequence[str], cells: list[str], where: str) -> ExpectedError:
    if len(cells) != len(columns):
        raise ValueError(f"{where}: {len(cells)} cells: must be {len(columns)}; {_REMEDY}")
    given = {"basis_groups": "0", **dict(zip(columns, cells, strict=True))}
    figures = TRAFFIC.get(given["traffic"], ())
    allowed = {
        "traffic": tuple(TRAFFIC),
        "figure": figures,
        "architecture": ARCHITECTURES,
        "level": tuple(level.value for level in Level),
    }
    for column, values in allowed.items():
        if given[column] not in values:
            raise ValueError(
                f"{where}: {column}={given[column]}: must be one of {', '.join(values)}; {_REMEDY}"
            )
    counts = [_number(given, column, where, least=1) for column in ("rows", "groups")]
    median, p90 = (_number(given, column, where, least=0) for column in ("median_percent", "p90_percent"))
    if median > p90:
        raise ValueError(f"{where}: median_percent={median:g}: must be <= p90_percent={p90:g}; {_REMEDY}")
    basis = int(_number(given, "basis_groups", where, least=0))
    return ExpectedError(
        given["traffic"],
        given["figure"],
        given["engine"],
        given["gpu"],
        given["architecture"],
        Level(given["level"]),
        int(counts[0]),
        int(counts[1]),
        median,
        p90,
        0 if basis == int(counts[1]) else basis,
    )


def _number(given: dict[str, str], column: str, where: str, *, least: int) -> float:
    try:
        value = float(given[column])
    except ValueError:
        value = math.nan
    if not least <= value < math.inf:
        raise ValueError(f"{where}: {column}={given[column]}: must be a number >= {least}; {_REMEDY}")
    return value


LEAST_ROWS = 5
"""Minimum number of measured rows for a GPU's own values, unless they were widened by more groups."""


class Place(NamedTuple):
    """Where a run is in the table."""

    engine: str
    gpu: str
    architecture: str
    level: Level


def errors_at(
    table: Iterable[ExpectedError], place: Place, traffic: str, least_rows: int = LEAST_ROWS
) -> dict[str, ExpectedError]:
    """Returns the rows of a kind of traffic by metric, each the closest available row to the place.

    The closest are rows of the engine on the GPU, then of the engine on all GPUs, then of all engines. Empty
    if no engine was compared on this kind of model and traffic. A GPU of level `relative` has no own rows.
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
