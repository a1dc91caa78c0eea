"""The target drafts with some of its layers.

Zhang et al., "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding", ACL
2024; Elhoushi et al., "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding", ACL 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.speculation import SlotRules
from policies.speculation.proposers.chain import Chain


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfSpeculative(Chain):
    """Drafts with the layers that the draft keeps, on the KV of these layers."""

    method: ClassVar[str] = "self_speculative"

    @property
    def rules(self) -> SlotRules:
        """Keeps slots for the KV of its draft tokens; no engine schedules it asynchronously."""
        return SlotRules(keeps_lookahead=True, overlaps=False)
