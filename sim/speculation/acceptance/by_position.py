"""Acceptance with a rate for every place of a draft: later draft tokens are accepted less often.

Rates are given in one of three ways; the last two are those of vLLM's synthetic acceptance:

    rates                        conditional: accepted if all tokens before it in the pass are    .8  .75 .7
    synthetic_acceptance_rates   unconditional: all tokens up to this place are accepted          .8  .6  .42
    synthetic_acceptance_length  mean accepted length with the least variance: 2.82 means         1.  .82 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fieldlimits import Checked, Share, check
from policies.core.request import Request
from policies.speculation import Proposer, num_places
from sim.speculation import Verdicts
from sim.speculation.acceptance.rates import (
    num_ranks,
    require_rates,
    verdicts_of,
    with_ranks,
)

_WAYS = ("rates", "synthetic_acceptance_rates", "synthetic_acceptance_length", "rates_by_rank")
_ROUNDING = 1e-9  # tolerance of sums of decimal rates


@dataclass(frozen=True, kw_only=True, slots=True)
class ByPosition(Checked):
    """Accepts a draft token with the probability of its place.

    Exactly one of the three settings must be set.
    """

    rates: tuple[float, ...] | None = None
    """Conditional rate of each place, from the first: accepted if all tokens before it in the pass are."""
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    """Unconditional rate of each place: all draft tokens up to it are accepted; must not increase."""
    synthetic_acceptance_length: float | None = None
    """Mean accepted length, 1 + accepted draft tokens per pass, with the least variance."""
    rates_by_rank: tuple[tuple[float, ...], ...] | None = None
    """For trees: conditional rates of each place by rank; those of one place must have a sum of at most 1."""
    rank_decay: Share = 0.32
    """For trees without rates_by_rank: ratio of the rate of further ranks (if earlier ones missed) to the
    first.
    """

    def __post_init__(self) -> None:
        check(self)
        given = [name for name in _WAYS if getattr(self, name) is not None]
        if not given:
            raise ValueError(
                f"rates=null: exactly one of {', '.join(_WAYS)} must be given, such as rates=[0.8,0.7,0.6]"
            )
        if len(given) > 1:
            raise ValueError(
                f"{given[0]}: only one of {', '.join(given)} may be given; set the others to null"
            )
        if self.rates is not None:
            require_rates("rates", self.rates)
        if self.synthetic_acceptance_rates is not None:
            _require_unconditional(self.synthetic_acceptance_rates)
        if self.rates_by_rank is not None:
            _require_ranks(self.rates_by_rank)
        length = self.synthetic_acceptance_length
        if length is not None and not 1 <= length < np.inf:
            raise ValueError(f"synthetic_acceptance_length={length}: must be finite and >= 1 token")

    def check(self, proposer: Proposer) -> None:
        """Raises ValueError if there are fewer rates than places or ranks in its drafts."""
        places, ranks, length = num_places(proposer), num_ranks(proposer), self.synthetic_acceptance_length
        if length is not None:
            if length > places + 1:
                raise ValueError(
                    f"synthetic_acceptance_length={length}: must be <= {places + 1} tokens, "
                    f"the most with {places} draft tokens per pass"
                )
            return
        name, given = next((name, getattr(self, name)) for name in _WAYS if getattr(self, name) is not None)
        if len(given) < places:
            raise ValueError(
                f"{name}: has rates of {len(given)} places, and a draft has {places}; "
                "give one rate per place, or set a smaller speculation.num_speculative_tokens"
            )
        if self.rates_by_rank is not None and len(self.rates_by_rank[0]) < ranks:
            raise ValueError(
                f"rates_by_rank: has rates of {len(self.rates_by_rank[0])} ranks, and a node of the tree has "
                f"{ranks} children; give one rate per child, 0 where there is none"
            )

    def verdicts(self, request: Request, seed: int, num_positions: int, proposer: Proposer) -> Verdicts:
        """Returns the verdicts on drafts that begin at output positions 0 to num_positions - 1."""
        rates_KR = rates_of(self, num_places(proposer), num_ranks(proposer))
        return verdicts_of(rates_KR, request, seed, num_positions, proposer)


@lru_cache(maxsize=256)
def rates_of(model: ByPosition, num_places: int, num_ranks: int) -> NDArray[np.float64]:
    """Returns the conditional rates by place and rank. Must not be changed."""
    if model.rates_by_rank is not None:
        return np.array(model.rates_by_rank)[:num_places, :num_ranks]
    if model.rates is not None:
        rates_K = np.array(model.rates)
    elif model.synthetic_acceptance_rates is not None:
        rates_K = conditional(np.array(model.synthetic_acceptance_rates))
    else:
        assert model.synthetic_acceptance_length is not None
        num_accepted = model.synthetic_acceptance_length - 1
        rates_K = np.clip(num_accepted - np.arange(num_places), 0, 1)
    return with_ranks(rates_K[:num_places], num_ranks, model.rank_decay)


def conditional(unconditional_K: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the conditional rates that follow from unconditional ones.

    Places that no draft reaches have rate 0.
    """
    reached_K = np.concatenate([[1.0], unconditional_K[:-1]])
    rates_K = np.zeros(len(reached_K))
    np.divide(unconditional_K, reached_K, out=rates_K, where=reached_K > 0)
    return rates_K


def _require_unconditional(rates: tuple[float, ...]) -> None:
    require_rates("synthetic_acceptance_rates", rates)
    for place, (before, rate) in enumerate(pairwise(rates), 2):
        if rate > before:
            raise ValueError(
                f"synthetic_acceptance_rates: place {place} has {rate}, more than {before} before it; "
                "unconditional rates must not increase (conditional ones are given as rates)"
            )


def _require_ranks(rates: tuple[tuple[float, ...], ...]) -> None:
    if not rates:
        raise ValueError("rates_by_rank=[]: must have one list of rates per place")
    for place, of_place in enumerate(rates, 1):
        require_rates(f"rates_by_rank[{place - 1}]", of_place)
        if len(of_place) != len(rates[0]):
            raise ValueError(
                f"rates_by_rank: place {place} has {len(of_place)} ranks and place 1 {len(rates[0])}; "
                "must have the same number, 0 where there is none"
            )
        if sum(of_place) > 1 + _ROUNDING:
            raise ValueError(
                f"rates_by_rank: the rates of place {place} have the sum {sum(of_place):.6g}; must be <= 1, "
                "because at most one child of a node is accepted"
            )
