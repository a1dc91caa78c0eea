"""Acceptance from published mean accepted lengths by method and task, as in Spec-Bench's tables.

Papers report tokens per pass for a method and a task, rarely rates by place. The rate a of every draft token
that follows is the one with which a draft of the measured shape has this mean length:

    chain of K tokens   1 + a + ... + a^K = length
    tree                1 + the sum over its nodes of the product of the rates on the path to the node

A tree is taken to be the measured one. A chain may have another K than the measured one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from policies.core.request import Request
from policies.speculation import Proposer
from policies.speculation.tree import TokenTree
from sim.speculation.acceptance import Verdicts
from sim.speculation.acceptance.iid import same_rates
from sim.speculation.acceptance.rates import (
    mean_accepted_length,
    num_places,
    num_ranks,
    require_share,
    verdicts_of,
)
from sim.speculation.acceptance.tasks import require_tasks, task_of

_BISECTIONS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class MeanLengths:
    """Accepts every draft token with the probability that gives the published mean accepted length."""

    lengths: Mapping[str, Mapping[str, float]]
    """Method of the proposer -> task -> mean accepted length: 1 + accepted draft tokens per pass."""
    num_draft_tokens: Mapping[str, int]
    """Method -> draft tokens of a pass in the measurement; for trees their depth."""
    task: str | None = None
    """Task of all requests; None: every session has one of the tasks, all equally likely."""
    tasks: Mapping[str, str] = field(default_factory=dict)
    """Tenant -> task of its requests."""
    rank_decay: float = 0.32
    """For trees: the rate of further ranks, where those before have missed, over the rate of rank 1."""

    def __post_init__(self) -> None:
        require_share("rank_decay", self.rank_decay)
        if not self.lengths:
            raise ValueError("lengths={}: must have at least one method")
        first = next(iter(self.lengths.values()))
        for method, by_task in self.lengths.items():
            most = self.num_draft_tokens.get(method, 0)
            if most < 1:
                raise ValueError(f"num_draft_tokens.{method}={most}: must be >= 1, as in the measurement")
            if set(by_task) != set(first) or not by_task:
                absent = sorted(set(first) ^ set(by_task))
                raise ValueError(
                    f"lengths.{method}: every method must have the same tasks; {', '.join(absent) or 'none'} "
                    "is missing in one of them"
                )
            for task, length in by_task.items():
                if not 1 <= length <= most + 1:
                    raise ValueError(
                        f"lengths.{method}.{task}={length}: must be >= 1 and <= {most + 1} tokens, the most "
                        f"with {most} draft tokens per pass"
                    )
        require_tasks(self.task, self.tasks, first, "lengths")

    def check(self, proposer: Proposer) -> None:
        """Raises ValueError if there are no lengths for the proposer, or longer ones than its tree allows."""
        if proposer.method not in self.lengths:
            raise ValueError(
                f"lengths: has no method {proposer.method}; choose speculation with one of "
                f"{', '.join(self.lengths)}, or acceptance=iid"
            )
        if proposer.tree is not None:
            longest = max(self.lengths[proposer.method].values())
            if longest > proposer.tree.depth + 1:
                raise ValueError(
                    f"lengths.{proposer.method}: {longest} tokens per pass cannot come from a tree of depth "
                    f"{proposer.tree.depth}; use the tree of the measurement"
                )

    def verdicts(self, request: Request, seed: int, num_positions: int, proposer: Proposer) -> Verdicts:
        """Returns the verdicts on drafts that begin at output positions 0 to num_positions - 1."""
        lengths = self.lengths[proposer.method]
        task = task_of(request, seed, self.task, self.tasks, tuple(lengths))
        if proposer.tree is None:
            rate = rate_of_chain(lengths[task], self.num_draft_tokens[proposer.method])
        else:
            rate = rate_of_tree(lengths[task], proposer.tree, self.rank_decay)
        rates_KR = same_rates(rate, self.rank_decay, num_places(proposer), num_ranks(proposer))
        return verdicts_of(rates_KR, request, seed, num_positions, proposer)


@lru_cache(maxsize=1024)
def rate_of_chain(length: float, num_draft_tokens: int) -> float:
    """Returns the rate with which drafts of so many tokens have a mean accepted length."""
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        rate = (low + high) / 2
        if mean_accepted_length(rate, num_draft_tokens) < length:
            low = rate
        else:
            high = rate
    return high


@lru_cache(maxsize=1024)
def rate_of_tree(length: float, tree: TokenTree, rank_decay: float) -> float:
    """Returns the rate of rank 1 with which a tree has a mean accepted length."""
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        rate = (low + high) / 2
        rates_KR = same_rates(rate, rank_decay, tree.depth, max(tree.ranks) + 1)
        if mean_length_of_tree(rates_KR, tree) < length:
            low = rate
        else:
            high = rate
    return high


def mean_length_of_tree(rates_KR: NDArray[np.float64], tree: TokenTree) -> float:
    """Computes the mean number of tokens of a pass from the rates of a tree by place and rank."""
    reached: list[float] = []
    for parent, depth, rank in zip(tree.parents, tree.depths, tree.ranks, strict=True):
        reached.append(float(rates_KR[depth - 1, rank]) * (1.0 if parent < 0 else reached[parent]))
    return 1 + sum(reached)
