"""Drafts the same number of tokens for every sequence in every pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.core.plan import FOREVER
from policies.speculation.view import DraftView


@dataclass(frozen=True, kw_only=True, slots=True)
class Fixed:
    """Drafts the same number of tokens for all sequences, as vLLM does by default."""

    needs_cost: ClassVar[bool] = False
    reads_sequences: ClassVar[bool] = False

    num_tokens: int | None = None
    """Draft tokens per pass; None: as many as the proposer drafts at most."""

    def __post_init__(self) -> None:
        if self.num_tokens is not None and self.num_tokens < 0:
            raise ValueError(f"num_tokens={self.num_tokens}: must be >= 0, or null for all that it drafts")

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
