"""Acceptance as counted in an engine, by task and place.

The table also records how often the proposer found any draft tokens, which matters for n-gram and suffix
matching. The length of a draft and its accepted length are drawn independently.

The table is a CSV file with one row per task and place:

    task,place,passes,drafted,accepted
    chat,1,1000,1000,760
    chat,2,1000,1000,540

passes: decoding passes of the task's sequences; drafted: passes with a draft token at this place (1, 2, ...);
accepted: passes in which it was accepted, which implies all earlier places. The task of a request follows
from its tenant, is fixed, or is drawn.
"""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fieldlimits import Checked, Share, check
from policies.core.request import Request
from policies.speculation import Proposer, num_places
from sim.speculation import STREAM, Verdicts
from sim.speculation.acceptance.rates import (
    num_ranks,
    uniforms,
    verdicts_of,
    with_ranks,
)
from sim.workload.modified import draw
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

        The length of a draft and its accepted length are assumed independent; both shares then equal the
        counts. A place that no pass has reached has rate 0.
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


def require_tasks(task: str | None, tasks: Mapping[str, str], known: Collection[str], where: str) -> None:
    """Raises ValueError if a setting names a task that a table does not have. where: the table."""
    named = {f"tasks.{tenant}": name for tenant, name in tasks.items()}
    if task is not None:
        named["task"] = task
    missing = {setting: name for setting, name in named.items() if name not in known}
    if missing:
        setting, name = next(iter(missing.items()))
        absent = ", ".join(sorted(set(missing.values())))
        raise ValueError(f"{setting}={name}: {where} has no task {absent}; it has {', '.join(sorted(known))}")


def task_of(
    request: Request, seed: int, task: str | None, tasks: Mapping[str, str], known: tuple[str, ...]
) -> str:
    """Returns the task of a request: its tenant's, else `task`, else one drawn uniformly.

    All requests of a session have the same task.
    """
    if request.tenant in tasks:
        return tasks[request.tenant]
    if task is not None:
        return task
    return known[int(draw(seed, f"{STREAM}/tasks", request) * len(known))]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table(Checked):
    """Accepts a draft token with the counted share of its task and place."""

    path: Path
    """CSV file with the columns task, place, passes, drafted, accepted."""
    task: str | None = None
    """Task of all requests; None: every session has one of the tasks, all equally likely."""
    tasks: Mapping[str, str] = field(default_factory=dict)
    """Tenant -> task of its requests."""
    rank_decay: Share = 0.32
    """For trees: the ratio of the rate of further ranks (if earlier ranks missed) to the rate of rank 1."""
    _by_task: dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        check(self)
        object.__setattr__(self, "path", Path(self.path).expanduser())
        counts = read_counts(self.path)
        require_tasks(self.task, self.tasks, counts, f"path={self.path}")
        by_task = {task: (np.array(of.rates()), np.array(of.drafted_shares())) for task, of in counts.items()}
        object.__setattr__(self, "_by_task", by_task)

    def check(self, proposer: Proposer) -> None:
        """Raises ValueError if a task has fewer places than the drafts of the proposer."""
        places = num_places(proposer)
        for task, (rates_K, _) in self._by_task.items():
            if len(rates_K) < places:
                raise ValueError(
                    f"path={self.path}: task {task} has {len(rates_K)} places, and a draft has {places}; "
                    "set a smaller speculation.num_speculative_tokens, or count again with more"
                )

    def verdicts(self, request: Request, seed: int, num_positions: int, proposer: Proposer) -> Verdicts:
        """Returns the verdicts on drafts that begin at output positions 0 to num_positions - 1."""
        places = num_places(proposer)
        task = task_of(request, seed, self.task, self.tasks, tuple(self._by_task))
        rates_K, shares_K = (column[:places] for column in self._by_task[task])
        decay = self.rank_decay
        return table_verdicts(rates_K, shares_K, decay, request, seed, num_positions, proposer)


def table_verdicts(
    rates_K: NDArray[np.float64],
    shares_K: NDArray[np.float64],
    rank_decay: float,
    request: Request,
    seed: int,
    num_positions: int,
    proposer: Proposer,
) -> Verdicts:
    """Draws the verdicts of a request.

    rates_K: probability by place that a draft token is accepted if all earlier ones are. shares_K: share of
    the passes with a draft token at a place. rank_decay: see `Table`.
    """
    rates_KR = with_ranks(rates_K, num_ranks(proposer), rank_decay)
    accepted, _ = verdicts_of(rates_KR, request, seed, num_positions, proposer)
    if shares_K[-1] == 1:
        return Verdicts(accepted)
    u = uniforms(seed, f"{STREAM}/proposed", request.request_id, num_positions)
    proposed = (u < shares_K[:, None]).view(np.uint8).sum(axis=0, dtype=np.uint8)
    return Verdicts(np.minimum(accepted, proposed), proposed)
