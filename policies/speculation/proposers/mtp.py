"""The model's own layers for multi-token prediction draft.

DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fieldlimits import PositiveInt
from policies.speculation import SlotRules
from policies.speculation.proposers.chain import Chain


@dataclass(frozen=True, kw_only=True, slots=True)
class Mtp(Chain):
    """Drafts with the modules in turn, each of them one token; a single module drafts all tokens."""

    method: ClassVar[str] = "mtp"

    num_nextn_predict_layers: PositiveInt = 1
    """Modules with weights of their own."""
    disable_eagle_block_drop: bool = False
    """True: the last block of a prefix-cache hit is used as it is, without the hidden states before it."""

    def __post_init__(self) -> None:
        Chain.__post_init__(self)  # super() does not know classes with slots
        modules, tokens = self.num_nextn_predict_layers, self.num_speculative_tokens
        if tokens > modules and tokens % modules:
            raise ValueError(
                f"num_speculative_tokens={tokens}: must be a multiple of num_nextn_predict_layers={modules}, "
                f"or less, as the modules draft in turn; nearest: {tokens - tokens % modules}"
            )

    @property
    def rules(self) -> SlotRules:
        """Keeps slots for its KV; several modules compute the end of a prompt together."""
        several = min(self.num_nextn_predict_layers, self.num_speculative_tokens) > 1
        return SlotRules(
            keeps_lookahead=True,
            drops_last_block=not self.disable_eagle_block_drop,
            prefill_lookahead=self.num_speculative_tokens if several else 0,
        )
