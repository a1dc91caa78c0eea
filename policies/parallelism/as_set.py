"""The sizes that are given: tensor_parallel_size=2 and its like, as engines have them."""

from __future__ import annotations

from dataclasses import dataclass

from policies.parallelism import Estimate, Facts, LayoutChoice


@dataclass(frozen=True, kw_only=True, slots=True)
class AsSet:
    """Nothing is chosen."""

    def choose(self, facts: Facts, estimate: Estimate) -> LayoutChoice:
        """The run's own keys."""
        return LayoutChoice(facts.given)
