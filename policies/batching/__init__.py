"""What shares an iteration. One policy a file."""

from __future__ import annotations

from typing import Protocol

from policies.core.step import StepBuilder
from policies.core.view import StepView


class Batching(Protocol):
    """Fills one step: looks at the view, acts through the builder."""

    def fill(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Decide what the next iteration computes. `now`: seconds on the caller's clock."""
        ...
