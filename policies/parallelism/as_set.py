"""The sizes as given: tensor_parallel_size=2 and the like, as engines have them."""

from __future__ import annotations

from dataclasses import dataclass

from policies.parallelism import Estimate, Facts, LayoutChoice


@dataclass(frozen=True, kw_only=True, slots=True)
class AsSet:
    """Takes the sizes that the run sets."""

    def choose(self, facts: Facts, estimate: Estimate) -> LayoutChoice:
        """The sizes of the run's own settings."""
        return LayoutChoice(facts.given)
