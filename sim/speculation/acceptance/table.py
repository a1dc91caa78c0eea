"""Acceptance as counted in an engine, by task and place.

The table also says how often the proposer has found draft tokens at all, which matters for n-gram and suffix
matching. How far a draft goes and how far it is accepted are drawn independently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
from sim.speculation.acceptance.table_files import read_counts
from sim.speculation.acceptance.tasks import require_tasks, task_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Table(Checked):
    """Accepts a draft token with the share that was counted for its task and place."""

    path: Path
    """CSV file with the columns task, place, passes, drafted, accepted."""
    task: str | None = None
    """Task of all requests; None: every session has one of the tasks, all equally likely."""
    tasks: Mapping[str, str] = field(default_factory=dict)
    """Tenant -> task of its requests."""
    rank_decay: Share = 0.32
    """For trees: the rate of further ranks, where those before have missed, over the rate of rank 1."""
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

    rates_K: probability by place that a draft token is accepted if those before it are. shares_K: share of
    the passes with a draft token at a place. rank_decay: see `Table`.
    """
    rates_KR = with_ranks(rates_K, num_ranks(proposer), rank_decay)
    accepted, _ = verdicts_of(rates_KR, request, seed, num_positions, proposer)
    if shares_K[-1] == 1:
        return Verdicts(accepted)
    u = uniforms(seed, f"{STREAM}/proposed", request.request_id, num_positions)
    proposed = (u < shares_K[:, None]).view(np.uint8).sum(axis=0, dtype=np.uint8)
    return Verdicts(np.minimum(accepted, proposed), proposed)
