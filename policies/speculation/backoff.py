"""Stops drafting for sequences whose drafts fail, and tries again after ever longer pauses.

Some texts are hard to guess, and their drafts cost rows of a pass. After `max_misses` passes in a row without
an accepted draft token a sequence pauses. It drafts again for one pass whenever the number of its output
tokens is a multiple of its interval, which doubles with each further miss (binary exponential backoff, as in
Ethernet: Metcalfe and Boggs, 1976); the first accepted token ends the pause. A pausing sequence gets one
token per pass, so the interval counts passes. Only the counts of a sequence matter: the policy has no state.

    max_misses=4, retry_interval=16:  misses  4-4  -> drafts at 16, 32, 48, ... output tokens
                                              5    -> at 32, 64, ...
                                              6    -> at 64, 128, ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray

from fieldlimits import Checked, PositiveInt, check
from policies.speculation import DraftView


@dataclass(frozen=True, kw_only=True, slots=True)
class Backoff(Checked):
    """Drafts for every sequence except those with `max_misses` failed drafts in a row, which pause."""

    needs_cost: ClassVar[bool] = False
    reads_sequences: ClassVar[bool] = True

    max_misses: PositiveInt = 4
    """Passes in a row without an accepted draft token after which a sequence pauses."""
    retry_interval: PositiveInt = 16
    """Output tokens between two attempts of a sequence that pauses, before it is doubled."""
    max_interval: PositiveInt = 256
    """Largest interval in output tokens: retry_interval times a power of 2."""
    num_tokens: Annotated[PositiveInt | None, "null for all that it drafts"] = None
    """Draft tokens per pass; None: as many as the proposer drafts at most."""

    def __post_init__(self) -> None:
        check(self)
        factor, rest = divmod(self.max_interval, self.retry_interval)
        if rest or factor & (factor - 1) or factor < 1:
            raise ValueError(
                f"max_interval={self.max_interval}: must be retry_interval={self.retry_interval} "
                "times a power of 2 (1, 2, 4, ...)"
            )

    @property
    def num_repeats(self) -> int:
        """Returns 1: sequences pause and try again while the batch stays the same."""
        return 1

    def num_draft_tokens(self, view: DraftView) -> NDArray[np.int64]:
        """Returns num_tokens for each sequence that does not pause or tries again, else 0."""
        limit = view.max_draft_tokens
        length = limit if self.num_tokens is None else min(self.num_tokens, limit)
        num_doublings = (self.max_interval // self.retry_interval).bit_length() - 1
        over = np.minimum(view.num_misses - self.max_misses, num_doublings)
        interval = np.left_shift(self.retry_interval, np.maximum(over, 0))
        return np.where((over < 0) | (view.num_output_tokens % interval == 0), length, 0)
