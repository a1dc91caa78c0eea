"""The given sizes: tensor_parallel_size=2 and the like, as in the engines' own options."""

from __future__ import annotations

from dataclasses import dataclass

from policies.parallelism import Estimate, Facts, LayoutChoice


@dataclass(frozen=True, kw_only=True, slots=True)
class AsSet:
    """Uses the sizes of the run's settings."""

    def choose(self, facts: Facts, estimate: Estimate) -> LayoutChoice:
        """Returns the sizes of the run's settings."""
        return LayoutChoice(facts.given)
