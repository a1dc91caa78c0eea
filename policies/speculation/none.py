"""Drafts nothing, while the engine keeps the memory and the slots of its proposer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.core.plan import FOREVER
from policies.speculation import DraftView


@dataclass(frozen=True, kw_only=True, slots=True)
class NoDrafts:
    """Never drafts: the baseline that has the costs of speculation in memory, and none of its gains."""

    needs_cost: ClassVar[bool] = False
    reads_sequences: ClassVar[bool] = False

    @property
    def num_repeats(self) -> int:
        """Returns FOREVER: it decides the same in every step."""
        return FOREVER

    def num_draft_tokens(self, view: DraftView) -> int:
        """Returns 0."""
        return 0

    def lengths(self, most: int) -> tuple[int, ...]:
        """Returns 0, the one number that it decides."""
        return (0,)
