"""Acceptance rates by place and rank, and the verdicts that follow from them.

A rate is conditional: the probability that a draft token is accepted if all tokens before it in its pass
are. Trees need the rates of ranks 2, 3, ... as well: of the children that the draft considers less likely
than its first choice. Where they have not been measured, every further rank finds the target's token, if all
ranks before it have not, with a probability that is smaller than that of rank 1 by a factor d, rank_decay:

    rate of rank r = (1 - a) (1 - d a)^(r - 2) d a        a: rate of rank 1; r = 2, 3, ...

Ranks are disjoint events, and this rule keeps their sum at most 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from policies.core.request import Request
from policies.speculation import Proposer
from sim.speculation import STREAM, Verdicts
from sim.speculation.acceptance.draws import uniforms
from sim.speculation.acceptance.walks import accepted_of_chain, accepted_of_tree


def num_ranks(proposer: Proposer) -> int:
    """Returns the maximum number of children of a node in the drafts of a proposer."""
    return 1 if proposer.tree is None else max(proposer.tree.ranks) + 1


def with_ranks(rates_K: NDArray[np.float64], num_ranks: int, rank_decay: float) -> NDArray[np.float64]:
    """Returns the rates by place and rank that follow from those of rank 1 by the rule of this module."""
    if num_ranks == 1:
        return rates_K[:, None]
    further_K1 = rank_decay * rates_K[:, None]
    found_KR = (1 - further_K1) ** np.arange(num_ranks - 1) * further_K1
    return np.concatenate([rates_K[:, None], (1 - rates_K)[:, None] * found_KR], axis=1)


def verdicts_of(
    rates_KR: NDArray[np.float64], request: Request, seed: int, num_positions: int, proposer: Proposer
) -> Verdicts:
    """Draws the verdicts on a request of which the drafts have the given rates by place and rank."""
    u = uniforms(seed, STREAM, request.request_id, num_positions + len(rates_KR) - 1)
    if proposer.tree is None:
        return Verdicts(accepted_of_chain(u, rates_KR[:, 0]))
    return Verdicts(accepted_of_tree(u, rates_KR, proposer.tree))


def mean_accepted_length(rate: float, num_draft_tokens: int) -> float:
    """Computes vLLM's mean acceptance length, the tokens per pass, with independent acceptance.

    1 + a + a^2 + ... + a^K = (1 - a^(K + 1)) / (1 - a); a = 0.8, K = 4: 3.3616.
    """
    return float(sum(rate**place for place in range(num_draft_tokens + 1)))


def require_rates(name: str, rates: Sequence[float]) -> None:
    """Raises ValueError for an empty list and for a rate that is no probability."""
    if not rates:
        raise ValueError(f"{name}=[]: must have one rate per draft token")
    for place, rate in enumerate(rates, 1):
        if not 0 <= rate <= 1:
            raise ValueError(f"{name}: place {place} has {rate}; must be a probability, >= 0 and <= 1")
