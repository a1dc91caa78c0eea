"""Acceptance that differs between requests: each has its own rate, drawn from a beta distribution.

Some texts are easier than others: a mean rate m and a concentration c give the beta distribution with the
parameters m c and (1 - m) c, whose variance is m (1 - m) / (c + 1). A small concentration means that requests
differ strongly; with a large one, all have the mean rate (`acceptance=iid`). The mean accepted length is
longer than that of the mean rate, because it is convex in the rate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import betaincinv

from fieldlimits import Checked, Positive, Share
from policies.core.request import Request
from policies.prediction import uniform
from policies.speculation import Proposer, num_places
from sim.speculation import STREAM, Verdicts
from sim.speculation.acceptance.rates import num_ranks, verdicts_of, with_ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Beta(Checked):
    """Accepts every draft token of a request with the same probability, which differs between requests."""

    mean: Share
    """Mean over the requests of the probability that a draft token is accepted."""
    concentration: Positive
    """Sum of the two parameters of the beta distribution; the smaller, the more requests differ."""
    rank_decay: Share = 0.32
    """For trees: the ratio of the rate of further ranks (if earlier ranks missed) to the rate of rank 1."""

    def check(self, proposer: Proposer) -> None:
        """Raises no error, because it supports every proposer."""

    def rate_of(self, request: Request, seed: int) -> float:
        """Returns the rate of a request."""
        if self.mean in (0, 1):
            return self.mean
        ones, zeros = self.mean * self.concentration, (1 - self.mean) * self.concentration
        return float(betaincinv(ones, zeros, uniform(seed, f"{STREAM}/rates", request.request_id)))

    def verdicts(self, request: Request, seed: int, num_positions: int, proposer: Proposer) -> Verdicts:
        """Returns the verdicts on drafts that begin at output positions 0 to num_positions - 1."""
        rates_K = np.full(num_places(proposer), self.rate_of(request, seed))
        rates_KR = with_ranks(rates_K, num_ranks(proposer), self.rank_decay)
        return verdicts_of(rates_KR, request, seed, num_positions, proposer)
