"""Reads tables of acceptance that were counted in an engine: CSV with one row per task and place.

    task,place,passes,drafted,accepted
    chat,1,1000,1000,760
    chat,2,1000,1000,540

passes: decoding passes of the task's sequences; drafted: those with a draft token at this place (1, 2, ...);
accepted: those in which it was accepted, which implies all places before it.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from sim.workload.trace_files import lines_of, require_file

COLUMNS = ("task", "place", "passes", "drafted", "accepted")
MAX_PLACES = 255
MAX_ROWS = 100_000
MAX_COUNT = 1 << 53
"""Limit of a count; larger ones would not be exact as floats."""


@dataclass(slots=True)
class TaskCounts:
    """Counts of one task, by place from the first."""

    passes: int
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def rates(self) -> list[float]:
        """Computes the probability by place that a draft token is accepted if it is drafted and reached.

        How far a draft goes and how far it is accepted are taken to be independent; both shares then come out
        as counted. A place that no pass has reached has rate 0.
        """
        found, reached = [], float(self.drafted[0])
        for place, accepted in enumerate(self.accepted):
            if place:
                reached = self.accepted[place - 1] * self.drafted[place] / max(self.drafted[place - 1], 1)
            found.append(min(accepted / reached, 1.0) if reached else 0.0)
        return found

    def drafted_shares(self) -> list[float]:
        """Computes the share of passes with a draft token at each place."""
        return [drafted / self.passes for drafted in self.drafted]


def read_counts(path: Path) -> dict[str, TaskCounts]:
    """Reads the counts of each task. Raises ValueError with file and line."""
    require_file(path)
    tasks: dict[str, TaskCounts] = {}
    for where, task, place, passes, drafted, accepted in _rows(path):
        counts = tasks.setdefault(task, TaskCounts(passes))
        if place != len(counts.drafted) + 1:
            raise ValueError(
                f"{where}: task {task} has place {place} after {len(counts.drafted)} places; list the places "
                "of a task in order, from 1"
            )
        if passes != counts.passes:
            raise ValueError(f"{where}: task {task} has {passes} passes, and {counts.passes} before")
        counts.drafted.append(drafted)
        counts.accepted.append(accepted)
        for name, column in (("drafted", counts.drafted), ("accepted", counts.accepted)):
            if any(after > before for before, after in pairwise(column[-2:])):
                raise ValueError(
                    f"{where}: task {task} has {name}={column[-1]} at place {place}, more than "
                    f"{column[-2]} at the place before; counts must not increase"
                )
    if not tasks:
        raise ValueError(f"{path}:2:1: expected at least one task, found none")
    return tasks


def _rows(path: Path) -> Iterator[tuple[str, str, int, int, int, int]]:
    reader = csv.reader(lines_of(path))
    header = next(reader, [])
    if missing := [name for name in COLUMNS if name not in header]:
        raise ValueError(
            f"{path}:1:1: no column {', '.join(missing)}; must have the columns {', '.join(COLUMNS)}"
        )
    at = [header.index(name) for name in COLUMNS]
    for number, row in enumerate(reader, 1):
        where = f"{path}:{reader.line_num}:1"
        if number > MAX_ROWS:
            raise ValueError(f"{where}: must have at most {MAX_ROWS:,} rows")
        if row:
            yield _checked(where, [row[i] if i < len(row) else "" for i in at])


def _checked(where: str, values: Sequence[str]) -> tuple[str, str, int, int, int, int]:
    task, *texts = values
    try:
        place, passes, drafted, accepted = (int(text) for text in texts)
    except ValueError:
        raise ValueError(
            f"{where}: expected whole numbers for {', '.join(COLUMNS[1:])}, found {', '.join(texts)[:80]}"
        ) from None
    if not task:
        raise ValueError(f"{where}: must name a task")
    if not 1 <= place <= MAX_PLACES:
        raise ValueError(f"{where}: place={place}: must be >= 1 and <= {MAX_PLACES}")
    if not 0 <= accepted <= drafted <= passes <= MAX_COUNT or not passes:
        raise ValueError(
            f"{where}: accepted={accepted}, drafted={drafted}, passes={passes}: must be >= 0 and in "
            "increasing order, with at least one pass"
        )
    return where, task, place, passes, drafted, accepted
