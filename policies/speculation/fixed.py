"""Drafts the same number of tokens for every sequence in every pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fieldlimits import Checked, NonNegativeInt
from policies.core.plan import FOREVER
from policies.speculation import DraftView


@dataclass(frozen=True, kw_only=True, slots=True)
class Fixed(Checked):
    """Drafts the same number of tokens for all sequences, as vLLM does by default."""

    needs_cost: ClassVar[bool] = False
    reads_sequences: ClassVar[bool] = False

    num_tokens: Annotated[NonNegativeInt | None, "null for all that it drafts"] = None
    """Draft tokens per pass; None: as many as the proposer drafts at most."""

    @property
    def num_repeats(self) -> int:
        """Returns FOREVER: it decides the same in every step."""
        return FOREVER

    def num_draft_tokens(self, view: DraftView) -> int:
        """Returns the number, as far as the proposer can draft so many."""
        limit = view.max_draft_tokens
        return limit if self.num_tokens is None else min(self.num_tokens, limit)

    def lengths(self, most: int) -> tuple[int, ...]:
        """Returns the one number that it decides."""
        return (most if self.num_tokens is None else min(self.num_tokens, most),)
