"""The most frequent continuation of the latest tokens, in suffix trees of the prompt and of earlier answers.

Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications", NeurIPS 2025.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fieldlimits import Ge, NonNegativeInt, PositiveInt, Share
from policies.speculation import SlotRules
from policies.speculation.proposers.chain import Chain


@dataclass(frozen=True, kw_only=True, slots=True)
class Suffix(Chain):
    """Drafts more tokens the longer the match is: at most max_spec_factor times its length."""

    method: ClassVar[str] = "suffix"

    suffix_decoding_max_tree_depth: PositiveInt = 24
    """Tokens of the match and of the draft together, at most."""
    suffix_decoding_max_cached_requests: NonNegativeInt = 10_000
    """Earlier answers in the tree, the oldest of which are dropped; 0: only the request's own tokens."""
    suffix_decoding_max_spec_factor: Annotated[float, Ge(0)] = 1.0
    """Draft tokens per matched token, at most."""
    suffix_decoding_min_token_prob: Share = 0.1
    """Least share of the earlier continuations that a draft token has."""

    @property
    def rules(self) -> SlotRules:
        """Needs the sampled tokens on the host, so the engine schedules synchronously."""
        return SlotRules(overlaps=False)
