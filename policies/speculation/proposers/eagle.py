"""A layer on the target's hidden states drafts, one token after the other.

Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", ICML 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.speculation import SlotRules
from policies.speculation.proposers.chain import ChainOrTree


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle(ChainOrTree):
    """Drafts a chain (as vLLM does), or a tree (as published, and in SGLang)."""

    method: ClassVar[str] = "eagle"

    disable_eagle_block_drop: bool = False
    """True: the last block of a prefix-cache hit is used as it is, without the hidden states before it."""

    @property
    def rules(self) -> SlotRules:
        """Keeps slots for its KV, and computes the last block of a hit again to have hidden states.

        A tree is drafted between two passes with the host's help: SGLang overlaps no draft of several
        branches, and vLLM drafts chains only.
        """
        return SlotRules(
            keeps_lookahead=True,
            drops_last_block=not self.disable_eagle_block_drop,
            overlaps=self.tree is None,
        )
