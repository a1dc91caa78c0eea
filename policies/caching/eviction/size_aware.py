"""GreedyDual-Size with frequency: evicts the entry of least value per freed token.

Cao and Irani, USITS 1997; Cherkasova, HP Labs 1998:

    value = age + hits * cost / num_tokens,   cost = fixed_cost_tokens + num_tokens

The cost of losing an entry is counted in tokens to compute again: its own, and a fixed part for the prefill
that a miss starts at all. Small entries are therefore kept longer, frequent ones too. `age` is the value of
the last victim: it rises, so that entries that are no longer used are overtaken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from policies.caching.eviction import Entry, Eviction


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeAware(Eviction):
    """Settings of GreedyDual-Size, and the age of one cache."""

    fixed_cost_tokens: float = 512.0
    """Cost of a miss beyond its tokens, in tokens. 0 leaves frequency with ageing."""
    _age: list[float] = field(init=False, hash=False, repr=False, default_factory=lambda: [0.0])

    def __post_init__(self) -> None:
        if not 0 <= self.fixed_cost_tokens < math.inf:
            raise ValueError(f"fixed_cost_tokens={self.fixed_cost_tokens}: must be >= 0 and finite")

    def key(self, entry: Entry) -> tuple[float, ...]:
        """Sort key: the value at the present age, then as `Lru`."""
        value = self._age[0] + entry.hits * (self.fixed_cost_tokens / entry.num_tokens + 1)
        return value, entry.last_access, -entry.depth, entry.inserted

    def fresh(self) -> Self:
        """Returns the same settings at age 0."""
        return replace(self)

    def evicted(self, entry: Entry, key: tuple[float, ...], queue_tokens: Sequence[int]) -> None:
        """Raises the age of the cache to the value of the victim."""
        self._age[0] = max(self._age[0], key[0])
