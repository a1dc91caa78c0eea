"""Prefix affinity as in SGLang's router: a prompt goes where the longest part of it was sent before.

The router asks no replica: it keeps a tree of what it has sent to each, which only approximates what these
still have in their caches. While the load is balanced, a prompt of which more than cache_threshold matches
goes to the replica that matches, any other to the replica with the smallest tree. If the load is out of
balance, the replica with the fewest outstanding requests gets it:

    most - fewest > balance_abs_threshold  and  most > balance_rel_threshold * fewest

Defaults are those of SGLang's router (sglang-router 0.2 and later: 0.3, 64, 1.5). Differences: it counts
characters, this policy tokens; it trims its tree every two minutes, this policy at once; of replicas with
equal matches it takes any, this policy the one with the longest run of the last piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from policies.caching.content import prompt_segments
from policies.core.request import Request, Segment
from policies.routing import ReplicaView
from policies.routing.loads import counts_of
from policies.routing.prefix_tree import PrefixTree


@dataclass(kw_only=True, slots=True)
class PrefixAffinity:
    """Longest matching prefix. Reads only the outstanding requests of all replicas."""

    cache_threshold: float = 0.3
    """Share of the prompt that must match."""
    balance_abs_threshold: int = 64
    """Outstanding requests by which the most loaded replica may exceed the least loaded."""
    balance_rel_threshold: float = 1.5
    """Ratio by which the most loaded replica may exceed the least loaded.

    Both thresholds must be exceeded.
    """
    max_tree_tokens: int = 2**24
    """Maximum number of tokens remembered per replica; SGLang's 2^26 characters are about as many."""
    _replicas: Sequence[ReplicaView] = field(init=False, default=(), repr=False, compare=False)
    _places: dict[int, int] = field(init=False, default_factory=dict, repr=False, compare=False)
    _tree: PrefixTree = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.cache_threshold <= 1:
            raise ValueError(f"cache_threshold={self.cache_threshold}: must be >= 0 and <= 1, a share")
        if self.balance_abs_threshold < 0:
            raise ValueError(f"balance_abs_threshold={self.balance_abs_threshold}: must be >= 0 requests")
        if not self.balance_rel_threshold >= 1:
            raise ValueError(f"balance_rel_threshold={self.balance_rel_threshold}: must be >= 1, a ratio")
        if self.max_tree_tokens < 1:
            raise ValueError(f"max_tree_tokens={self.max_tree_tokens}: must be >= 1 token")
        self._tree = PrefixTree(self.max_tree_tokens)

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """The replica with a matching prefix, the one with the smallest tree, or the least loaded one."""
        if replicas is not self._replicas:
            self._places = {replica.index: place for place, replica in enumerate(replicas)}
            self._tree.keep_only(self._places)
            self._replicas = replicas
        segments = prompt_segments(request)
        place = self._chosen(self._tree, segments, request.prompt.num_tokens, replicas)
        self._tree.insert(segments, replicas[place].index)
        return place

    def _chosen(
        self, tree: PrefixTree, segments: list[Segment], num_tokens: int, replicas: Sequence[ReplicaView]
    ) -> int:
        counts = counts_of(replicas, "num_outstanding")
        least = int(counts.argmin())
        most, fewest = int(counts[counts.argmax()]), int(counts[least])
        if most - fewest > self.balance_abs_threshold and most > self.balance_rel_threshold * fewest:
            return least
        match = tree.match(segments)
        if match.replica is not None and match.num_tokens > self.cache_threshold * num_tokens:
            return self._places[match.replica]  # `insert` marks it
        tree.use(match)
        return self._places[tree.smallest]
