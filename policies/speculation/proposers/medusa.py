"""Heads on the last hidden state, each of which predicts the token at one of the next places.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", ICML 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.speculation import SlotRules
from policies.speculation.proposers.chain import ChainOrTree


@dataclass(frozen=True, kw_only=True, slots=True)
class Medusa(ChainOrTree):
    """Drafts the likeliest token of each head, as vLLM does, or a tree of the likeliest, as published."""

    method: ClassVar[str] = "medusa"

    @property
    def rules(self) -> SlotRules:
        """Has no KV of its own; vLLM does not schedule it asynchronously."""
        return SlotRules(overlaps=False)
