"""What shares an iteration. One policy a file."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from policies.core.step import StepBuilder
from policies.core.view import StepView


class Batching(Protocol):
    """Fills one step: looks at the view, acts through the builder."""

    def fill(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Decide what the next iteration computes. `now`: seconds on the caller's clock."""
        ...


@runtime_checkable
class DecodesUnasked(Protocol):
    """A batching policy that has nothing to decide while all sequences there are decode."""

    @property
    def max_unasked_decodes(self) -> int:
        """Up to so many sequences, if there are no others and all decode, step without a call of `fill`.

        Promised: `fill` would give each of them its next token, and would promise this for ever
        (`decode_all`, `repeat`). `Scheduling.before_step` voids that: then `fill` is asked.
        """
        ...
