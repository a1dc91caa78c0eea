"""A small model of the same vocabulary drafts, one token after the other.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023; Chen et al.,
"Accelerating Large Language Model Decoding with Speculative Sampling", 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.speculation import SlotRules
from policies.speculation.proposers.chain import Chain


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftModel(Chain):
    """Drafts with a small model, which has weights and KV of its own."""

    method: ClassVar[str] = "draft_model"

    @property
    def rules(self) -> SlotRules:
        """Keeps slots for its KV; takes one more token per request, the last one that it has not seen."""
        return SlotRules(keeps_lookahead=True, num_input_slots=1)
