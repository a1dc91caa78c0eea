"""The target's own pass refines guesses of later tokens, of which n-grams are collected and verified.

Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", ICML 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar

from fieldlimits import Checked, Ge, PositiveInt, check
from policies.speculation import SlotRules, TokenTree
from policies.speculation.proposers.chain import check_num_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Lookahead(Checked):
    """Verifies several n-grams of the pool that begin with the newest token, without a draft model.

    A pass has window x (ngram - 1) rows that refine guesses and guesses x (ngram - 1) rows of candidates.
    """

    method: ClassVar[str] = "lookahead"

    draft: object
    """The rows that refine guesses: see `hwmodels.speculation.draft.PassDraft`."""
    window: PositiveInt = 15
    """W: later places that are guessed at once."""
    ngram: Annotated[int, Ge(2)] = 5
    """N: tokens of an n-gram, of which the first one is known."""
    guesses: PositiveInt = 15
    """G: n-grams that a pass verifies."""

    def __post_init__(self) -> None:
        check(self)
        rows = f"guesses={self.guesses}, ngram={self.ngram}: guesses x (ngram - 1)"
        check_num_tokens(self.num_speculative_tokens, rows)

    @property
    def num_speculative_tokens(self) -> int:
        """Draft tokens of a pass: those of all its n-grams but their first."""
        return self.guesses * (self.ngram - 1)

    @property
    def tree(self) -> TokenTree:
        """The n-grams as branches, none of which forks."""
        return _tree(self.guesses, self.ngram - 1)

    @property
    def rules(self) -> SlotRules:
        """Keeps slots for the KV of guesses; no engine schedules it asynchronously."""
        return SlotRules(keeps_lookahead=True, overlaps=False)


@lru_cache(maxsize=16)
def _tree(branches: int, depth: int) -> TokenTree:
    return TokenTree.of_widths([branches, *[1] * (depth - 1)])
