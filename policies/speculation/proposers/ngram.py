"""The tokens that followed the latest ones where they first occurred: in the prompt, the answer or a text.

Saxena, "Prompt Lookup Decoding", 2023; Yang et al., "Inference with Reference: Lossless Acceleration of Large
Language Models", 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fieldlimits import PositiveInt
from policies.speculation import SlotRules
from policies.speculation.proposers.chain import Chain


@dataclass(frozen=True, kw_only=True, slots=True)
class Ngram(Chain):
    """Drafts what follows an earlier occurrence of the last n tokens; n: from the longest to the shortest."""

    method: ClassVar[str] = "ngram"

    prompt_lookup_max: PositiveInt = 5
    """Tokens of the longest n-gram that is looked up."""
    prompt_lookup_min: int | None = None
    """Tokens of the shortest n-gram that is looked up; None: as the longest."""
    reference: tuple[int, ...] = ()
    """Token ids of a text in which n-grams are looked up too, for all requests."""

    def __post_init__(self) -> None:
        Chain.__post_init__(self)  # super() does not know classes with slots
        if not 1 <= self.min_ngram <= self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min={self.prompt_lookup_min}: must be 1 to {self.prompt_lookup_max}, "
                "prompt_lookup_max"
            )
        if any(token < 0 for token in self.reference):
            raise ValueError(f"reference={min(self.reference)}: must be token ids, which are >= 0")

    @property
    def min_ngram(self) -> int:
        """Tokens of the shortest n-gram that is looked up."""
        return self.prompt_lookup_max if self.prompt_lookup_min is None else self.prompt_lookup_min

    @property
    def rules(self) -> SlotRules:
        """Needs the sampled tokens on the host, so the engine schedules synchronously."""
        return SlotRules(overlaps=False)
