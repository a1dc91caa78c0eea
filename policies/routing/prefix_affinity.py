"""Prefix affinity as in SGLang's router: a prompt goes to the replica that was sent its longest prefix.

The router does not query the replicas: it keeps a tree of the prompts that it has sent to each, which only
approximates the contents of their caches. While the load is balanced, a prompt goes to the replica with the
longest matching prefix if that exceeds the share cache_threshold of the prompt, else to the replica with the
smallest tree. If the load is not balanced, it goes to the replica with the fewest outstanding requests:

    most - fewest > balance_abs_threshold  and  most > balance_rel_threshold * fewest

Defaults are those of SGLang's router (sglang-router 0.2 and later: 0.3, 64, 1.5). Differences: SGLang counts
characters, this policy tokens; SGLang trims its tree every two minutes, this policy at once; among replicas
with equal matches SGLang takes any, this policy the one that was sent the most tokens of the last segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from fieldlimits import Checked, Ge, NonNegativeInt, PositiveInt, Share, Unit, check
from policies.caching.content import prompt_segments
from policies.core.request import Request, Segment
from policies.routing import ReplicaView
from policies.routing.load_balancing import counts_of
from policies.routing.prefix_tree import PrefixTree


@dataclass(kw_only=True, slots=True)
class PrefixAffinity(Checked):
    """Longest matching prefix. Reads only the outstanding requests of all replicas."""

    cache_threshold: Share = 0.3
    """Share of the prompt that must match."""
    balance_abs_threshold: Annotated[NonNegativeInt, Unit("requests")] = 64
    """Outstanding requests by which the most loaded replica may exceed the least loaded."""
    balance_rel_threshold: Annotated[float, Ge(1)] = 1.5
    """Ratio of the most to the least loaded replica; the load is unbalanced if both are exceeded."""
    max_tree_tokens: Annotated[PositiveInt, Unit("token")] = 2**24
    """Maximum number of tokens in the tree per replica; about as many as SGLang's 2^26 characters."""
    keeps_together: ClassVar[str] = "prefix"
    _replicas: Sequence[ReplicaView] = field(init=False, default=(), repr=False, compare=False)
    _positions: dict[int, int] = field(init=False, default_factory=dict, repr=False, compare=False)
    _tree: PrefixTree = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check(self)
        self._tree = PrefixTree(self.max_tree_tokens)

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns the replica with the matching prefix, with the smallest tree, or with the least load."""
        if replicas is not self._replicas:
            self._positions = {replica.index: position for position, replica in enumerate(replicas)}
            self._tree.keep_only(self._positions)
            self._replicas = replicas
        segments = prompt_segments(request)
        position = self._chosen(self._tree, segments, request.prompt.num_tokens, replicas)
        self._tree.insert(segments, replicas[position].index)
        return position

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
            return self._positions[match.replica]  # `insert` marks it
        tree.use(match)
        return self._positions[tree.smallest]
