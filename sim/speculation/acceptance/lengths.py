"""Acceptance from published mean accepted lengths by method and task, as in Spec-Bench's tables.

Papers report tokens per pass for a method and a task, rarely rates by place. The rate a of rank 1, equal at
all places, is the rate at which the measured draft has this mean length:

    chain of K tokens   1 + a + ... + a^K = length
    tree                1 + the sum over its nodes of the product of the rates on the path to the node

The proposer of a run may draft a different number of tokens or a different tree, with the same rate.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fieldlimits import Checked, Share, check
from policies.core.request import Request
from policies.speculation import Proposer, TokenTree, num_places
from sim.speculation import Verdicts
from sim.speculation.acceptance.iid import same_rates
from sim.speculation.acceptance.rates import (
    mean_accepted_length,
    num_ranks,
    verdicts_of,
    with_ranks,
)
from sim.speculation.acceptance.table import require_tasks, task_of

_BISECTIONS = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class MeanLengths(Checked):
    """Accepts every draft token with the probability that gives the published mean accepted length."""

    lengths: Mapping[str, Mapping[str, float]]
    """Method of the proposer -> task -> mean accepted length: 1 + accepted draft tokens per pass."""
    num_draft_tokens: Mapping[str, int] = field(default_factory=dict)
    """Method -> draft tokens per pass in the measurement, for methods that drafted chains."""
    trees: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    """Method -> the measured tree as paths of ranks, such as [0, 2], for methods that drafted trees."""
    task: str | None = None
    """Task of all requests; None: every session has one of the tasks, all equally likely."""
    tasks: Mapping[str, str] = field(default_factory=dict)
    """Tenant -> task of its requests."""
    rank_decay: Share = 0.32
    """For trees: the ratio of the rate of further ranks (if earlier ranks missed) to the rate of rank 1."""
    _rates: dict[str, dict[str, float]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check(self)
        if not self.lengths:
            raise ValueError("lengths={}: must have at least one method")
        name, first = next(iter(self.lengths.items()))
        if not first:
            raise ValueError(f"lengths.{name}={{}}: must have at least one task")
        rates = {method: self._rates_of(method, by_task, first) for method, by_task in self.lengths.items()}
        require_tasks(self.task, self.tasks, first, "lengths")
        object.__setattr__(self, "_rates", rates)

    def _rates_of(
        self, method: str, by_task: Mapping[str, float], tasks: Collection[str]
    ) -> dict[str, float]:
        """Returns the rate of a method by task.

        Raises ValueError for lengths that are impossible with its draft.
        """
        if absent := sorted(set(tasks) ^ set(by_task)):
            raise ValueError(
                f"lengths.{method}: every method must have the same tasks; {', '.join(absent)} is missing in "
                "one of them"
            )
        num_tokens, paths = self.num_draft_tokens.get(method), self.trees.get(method)
        if (num_tokens is None) == (paths is None):
            raise ValueError(
                f"lengths.{method}: must have either num_draft_tokens.{method} or trees.{method}, the draft "
                "of the measurement"
            )
        if paths is not None:
            try:
                tree = TokenTree.of_paths([list(path) for path in paths])
            except ValueError as error:
                raise ValueError(f"trees.{method}: {error}") from None
            most = tree.depth
        else:
            most = num_tokens or 0
            if most < 1:
                raise ValueError(f"num_draft_tokens.{method}={most}: must be >= 1")
        for task, length in by_task.items():
            if not 1 <= length <= most + 1:
                raise ValueError(
                    f"lengths.{method}.{task}={length}: must be >= 1 and <= {most + 1} tokens, the most with "
                    f"{most} draft tokens one after the other"
                )
        if paths is None:
            return {task: rate_of_chain(length, most) for task, length in by_task.items()}
        return {task: rate_of_tree(length, tree, self.rank_decay) for task, length in by_task.items()}

    def check(self, proposer: Proposer) -> None:
        """Raises ValueError if there are no lengths for the method of the proposer."""
        if proposer.method not in self.lengths:
            raise ValueError(
                f"lengths: has no method {proposer.method}; choose speculation with one of "
                f"{', '.join(self.lengths)}, or acceptance=iid"
            )

    def verdicts(self, request: Request, seed: int, num_positions: int, proposer: Proposer) -> Verdicts:
        """Returns the verdicts on drafts that begin at output positions 0 to num_positions - 1."""
        rates = self._rates[proposer.method]
        rate = rates[task_of(request, seed, self.task, self.tasks, tuple(rates))]
        rates_KR = same_rates(rate, self.rank_decay, num_places(proposer), num_ranks(proposer))
        return verdicts_of(rates_KR, request, seed, num_positions, proposer)


def rate_of_chain(length: float, num_draft_tokens: int) -> float:
    """Returns the rate at which drafts of this many tokens have a given mean accepted length."""
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        rate = (low + high) / 2
        if mean_accepted_length(rate, num_draft_tokens) < length:
            low = rate
        else:
            high = rate
    return high


def rate_of_tree(length: float, tree: TokenTree, rank_decay: float) -> float:
    """Returns the rate of rank 1 at which a tree has a given mean accepted length."""
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        rate = (low + high) / 2
        rates_KR = with_ranks(np.full(tree.depth, rate), max(tree.ranks) + 1, rank_decay)
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
