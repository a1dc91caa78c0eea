"""Acceptance that depends on the class of a request: its tenant, adapter, model or priority.

Drafts for code are accepted more often than drafts for conversations. If a workload assigns tenants (or
adapters, models, priorities) to its requests, each of them can have its own rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from fieldlimits import Checked, OneOf, Share, check
from policies.core.request import Request
from policies.speculation import Proposer, num_places
from sim.speculation import Verdicts
from sim.speculation.acceptance.iid import same_rates
from sim.speculation.acceptance.rates import num_ranks, verdicts_of

ATTRIBUTES = ("tenant", "adapter", "model", "priority")


@dataclass(frozen=True, kw_only=True, slots=True)
class ByClass(Checked):
    """Accepts every draft token with the probability of the class of its request."""

    by: Annotated[str, OneOf(ATTRIBUTES)] = "tenant"
    """The attribute that names the class of a request: tenant, adapter, model or priority."""
    rates: Mapping[str, Share] = field(default_factory=dict)
    """Class -> probability that a draft token is accepted if all tokens before it in its pass are."""
    others: Share = 0.8
    """The probability for requests of any other class, or of no class."""
    rank_decay: Share = 0.32
    """For trees: the ratio of the rate of further ranks (if earlier ranks missed) to the rate of rank 1."""

    def __post_init__(self) -> None:
        check(self)
        if not self.rates:
            raise ValueError(
                f"rates={{}}: must give at least one {self.by} a rate, such as "
                "++acceptance.rates={code:0.9}; for the same rate everywhere choose acceptance=iid"
            )

    def check(self, proposer: Proposer) -> None:
        """Raises no error, because it supports every proposer."""

    def rate_of(self, request: Request) -> float:
        """Returns the rate of the class of a request."""
        return self.rates.get(str(getattr(request, self.by)), self.others)

    def verdicts(self, request: Request, seed: int, num_positions: int, proposer: Proposer) -> Verdicts:
        """Returns the verdicts on drafts that begin at output positions 0 to num_positions - 1."""
        rate = self.rate_of(request)
        rates_KR = same_rates(rate, self.rank_decay, num_places(proposer), num_ranks(proposer))
        return verdicts_of(rates_KR, request, seed, num_positions, proposer)
