"""GreedyDual-Size with frequency: evicts the entry of least value per freed token.

Cao and Irani, USITS 1997; Cherkasova, HP Labs 1998:

    value = age + hits * cost / num_tokens,   cost = fixed_cost_tokens + num_tokens

The cost of losing an entry is the number of tokens to recompute: its own, plus a fixed part for the prefill
that a miss causes. Small and frequently used entries are therefore kept longer. `age` is the value of the
last victim; it increases, so that entries that are no longer used are evicted at some time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from fieldlimits import Checked, NonNegative
from policies.caching.eviction import Entry, Eviction


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeAware(Checked, Eviction):
    """Settings of GreedyDual-Size, and the age for one cache."""

    fixed_cost_tokens: NonNegative = 512.0
    """Fixed part of the cost of a miss, in tokens; 0: least frequently used with ageing."""
    _age: list[float] = field(init=False, hash=False, repr=False, default_factory=lambda: [0.0])

    def key(self, entry: Entry) -> tuple[float, ...]:
        """Returns the sort key: the value at the present age, then as `Lru`."""
        value = self._age[0] + entry.hits * (self.fixed_cost_tokens / entry.num_tokens + 1)
        return value, entry.last_access, -entry.depth, entry.inserted

    def fresh(self) -> Self:
        """Returns the same settings at age 0."""
        return replace(self)

    def evicted(self, entry: Entry, key: tuple[float, ...], queue_tokens: Sequence[int]) -> None:
        """Increases the age of the cache to the value of the victim."""
        self._age[0] = max(self._age[0], key[0])
