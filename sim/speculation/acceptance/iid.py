"""Independent acceptance of every draft token with the same probability (Leviathan et al., ICML 2023).

The number of accepted tokens of a pass is geometric, cut at K. Its mean length with the target's own token is
(1 - a^(K + 1)) / (1 - a): 3.3616 for a = 0.8 and K = 4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from fieldlimits import Checked, OneOf, Share, check
from policies.core.request import Request
from policies.speculation import Proposer, num_places
from sim.speculation import Acceptance, Verdicts
from sim.speculation.acceptance.published import TASKS, published_rate
from sim.speculation.acceptance.rates import num_ranks, verdicts_of, with_ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Iid(Checked):
    """Accepts every draft token with the same probability."""

    rate: Share | None
    """Probability that a draft token is accepted if all tokens before it in its pass are; None: the published
    one of the proposer and the task."""
    task: Annotated[str | None, OneOf(TASKS)] = None
    """Task of the requests, for rate=None: one of `TASKS`; None: that of the workload, else chat."""
    rank_decay: Share = 0.32
    """For trees: the rate of further ranks, where those before have missed, over the rate of rank 1."""

    def __post_init__(self) -> None:
        check(self)
        if self.task is not None and self.rate is not None:
            raise ValueError(f"task={self.task}, rate={self.rate:g}: a task has no effect beside a rate")

    def check(self, proposer: Proposer) -> None:
        """Raises no error: it can judge the drafts of every proposer."""

    def verdicts(self, request: Request, seed: int, num_positions: int, proposer: Proposer) -> Verdicts:
        """Returns the verdicts on drafts that begin at output positions 0 to num_positions - 1."""
        rate = published_rate(proposer.method, self.task or TASKS[0]) if self.rate is None else self.rate
        rates_KR = same_rates(rate, self.rank_decay, num_places(proposer), num_ranks(proposer))
        return verdicts_of(rates_KR, request, seed, num_positions, proposer)


@lru_cache(maxsize=256)
def same_rates(rate: float, rank_decay: float, num_places: int, num_ranks: int) -> NDArray[np.float64]:
    """Returns the rates by place and rank of drafts with the same rate at all places. Must not be changed."""
    return with_ranks(np.full(num_places, rate), num_ranks, rank_decay)


def for_task(acceptance: Acceptance | None, task: str) -> Acceptance | None:
    """Returns the acceptance for a workload's task: published rates have it, unless their task is set."""
    if isinstance(acceptance, Iid) and acceptance.rate is None and acceptance.task is None:
        return replace(acceptance, task=task)
    return acceptance
