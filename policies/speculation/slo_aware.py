"""Drafts only for sequences that are behind the TPOT of their SLO.

The idea of AdaServe (arXiv 2501.12162, 2025): verification is spent on the sequences that need it. AdaServe
selects nodes of a token tree by the draft model's probabilities; here a sequence gets all draft tokens or
none.
The TPOT of a sequence so far is (now - time of its first token) / (output tokens - 1); with one output token
it has none, and is not behind. With asynchronous scheduling the tokens of the last step are not read yet, so
the TPOT of a short output is overestimated by at most one step per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray

from fieldlimits import Checked, Ge, Lt, Positive, PositiveInt, Unit
from policies.speculation import DraftView


@dataclass(frozen=True, kw_only=True, slots=True)
class SloAware(Checked):
    """Drafts for the sequences whose TPOT so far is above a share of the one that the SLO allows."""

    needs_cost: ClassVar[bool] = False
    reads_sequences: ClassVar[bool] = True

    tpot_s: Annotated[Positive | None, Unit("s"), "null for that of the SLO"] = None
    """Time per output token to keep, s; None: that of the SLO."""
    margin: Annotated[float, Ge(0), Lt(1), Unit("share")] = 0.1
    """Share of tpot_s by which a sequence must be faster to go without drafts."""
    num_tokens: Annotated[PositiveInt | None, "null for all that it drafts"] = None
    """Draft tokens per pass of a sequence that is behind; None: as many as the proposer drafts at most."""

    @property
    def needs_tpot(self) -> bool:
        """True if the run must have an SLO with a TPOT."""
        return self.tpot_s is None

    @property
    def num_repeats(self) -> int:
        """Returns 1: sequences fall behind and catch up while the batch stays the same."""
        return 1

    def num_draft_tokens(self, view: DraftView) -> NDArray[np.int64]:
        """Returns num_tokens for each sequence that is behind, else 0."""
        tpot_s = view.tpot_s if self.tpot_s is None else self.tpot_s
        assert tpot_s is not None, "needs_tpot"
        limit = view.max_draft_tokens
        length = limit if self.num_tokens is None else min(self.num_tokens, limit)
        allowed_s = (view.num_output_tokens - 1) * (tpot_s * (1 - self.margin))
        is_behind = (view.now - view.first_token_s > allowed_s) & (view.num_output_tokens > 1)
        return np.where(is_behind, length, 0)
