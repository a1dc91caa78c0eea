"""Prompts sent to each replica: one tree for all replicas.

A node is a piece of content behind a given past: (parent node, tokens taken of the parent, content). A node
stores for each replica the longest run of its tokens that the replica was sent. So pieces that branch off
behind 5 and behind 9 tokens of a piece are children of the same node, and no node is ever split:

    sent to 0    7 7 7 7 7 9 9         7: {0: 5, 1: 8} --5--> 9: {0: 2}
    sent to 1    7 7 7 7 7 7 7 7 3                     --8--> 3: {1: 1}

The tokens of a replica are those of its distinct prefixes. Above a limit the pieces sent longest ago are
forgotten, the end of a prompt before its beginning. Costs grow with the number of pieces of a prompt, not
with the number of replicas.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from heapq import heapify, heappush, heapreplace
from typing import NamedTuple

from policies.core.request import Segment


class PrefixNode:
    """A piece of content at one place.

    There are millions, so a node of only one replica has no dictionary.
    """

    __slots__ = ("key", "longest", "num_longest", "tokens")

    def __init__(self, key: tuple[PrefixNode, int, int] | None) -> None:
        self.key = key  # parent, tokens taken of it, content id; None: the root
        self.longest: int | None = None  # the replica of the longest run, the first of equals
        self.num_longest = 0  # tokens of that run
        self.tokens: dict[int, int] | None = None  # longest run per replica; None: at most one replica

    def tokens_of(self, replica: int) -> int:
        """Number of tokens of the longest run that a replica was sent; 0: none."""
        if self.tokens is not None:
            return self.tokens.get(replica, 0)
        return self.num_longest if self.longest == replica else 0

    def lengthen(self, replica: int, num_tokens: int) -> None:
        """Records that a replica was sent a longer run than before."""
        if self.tokens is not None:
            self.tokens[replica] = num_tokens
        elif self.longest is not None and self.longest != replica:
            self.tokens = {self.longest: self.num_longest, replica: num_tokens}
        if num_tokens > self.num_longest:
            self.longest, self.num_longest = replica, num_tokens

    def forget(self, replica: int) -> int:
        """Removes a replica from the node. Returns the number of tokens that it was sent."""
        if self.tokens is None:
            num_tokens, self.longest, self.num_longest = self.num_longest, None, 0
            return num_tokens
        tokens = self.tokens
        num_tokens = tokens.pop(replica)
        if self.longest == replica:
            self.longest = max(tokens, key=lambda other: (tokens[other], -other))
            self.num_longest = tokens[self.longest]
        if len(tokens) == 1:
            self.tokens = None
        return num_tokens


class Match(NamedTuple):
    """The longest prefix of a prompt that a replica was sent, that replica, and the node where it ends."""

    num_tokens: int
    replica: int | None
    node: PrefixNode


class PrefixTree:
    """The prompts sent to each replica that the last `keep_only` named.

    num_tokens of each is at most max_tokens after every `insert`.
    """

    def __init__(self, max_tokens: int) -> None:
        self.num_tokens: dict[int, int] = {}
        self._max_tokens = max_tokens
        self._places: dict[int, int] = {}  # position of each replica in the last `keep_only`
        self._sizes: list[tuple[int, int, int]] = []
        """A heap of (tokens, place, replica).

        The least entry of a replica is its current size, or an older size
        if it has grown since.
        """
        self._root = PrefixNode(None)
        self._nodes: dict[tuple[PrefixNode, int, int], PrefixNode] = {}  # one dict for all nodes saves memory
        self._used: dict[int, OrderedDict[PrefixNode, None]] = {}
        """Nodes of each replica, the least recently used first; a node comes behind all nodes below it."""

    def keep_only(self, replicas: Iterable[int]) -> None:
        """Sets the replicas that exist from now on; what was sent to others is forgotten."""
        kept = dict.fromkeys(replicas)
        for replica in [*self._used.keys() - kept.keys()]:
            for node in [*self._used[replica]]:  # leaves
                self._forget(replica, node)
            del self._used[replica], self.num_tokens[replica]
        self._used = {replica: self._used.get(replica, OrderedDict()) for replica in kept}
        self.num_tokens = {replica: self.num_tokens.get(replica, 0) for replica in kept}
        self._places = {replica: place for place, replica in enumerate(kept)}
        self._list_sizes()

    def _list_sizes(self) -> None:
        self._sizes = [
            (tokens, self._places[replica], replica) for replica, tokens in self.num_tokens.items()
        ]
        heapify(self._sizes)

    @property
    def smallest(self) -> int:
        """The replica with the fewest tokens; of equals the one that `keep_only` named first."""
        sizes = self._sizes
        while True:
            num_tokens, place, replica = sizes[0]
            num_now = self.num_tokens[replica]
            if num_now == num_tokens:
                return replica
            heapreplace(sizes, (num_now, place, replica))

    def match(self, segments: Sequence[Segment]) -> Match:
        """Returns the longest prefix and the replica of the longest run at its end.

        `use` marks it as used.
        """
        node, before, num_tokens, nodes = self._root, 0, 0, self._nodes
        for content_id, num_in_segment in segments:
            child = nodes.get((node, before, content_id))
            if child is None:
                break
            node, before = child, num_in_segment
            if child.num_longest < num_in_segment:
                num_tokens += child.num_longest
                break
            num_tokens += num_in_segment
        return Match(num_tokens, node.longest, node)

    def use(self, match: Match) -> None:
        """Marks the path of a match as used; the match must be the last that was made."""
        if match.replica is not None:
            self._touch(match.replica, match.node)

    def insert(self, segments: Sequence[Segment], replica: int) -> None:
        """Records that a prompt was sent to a replica, and marks it as used."""
        node, before, nodes = self._root, 0, self._nodes
        for content_id, num_in_segment in segments:
            key = (node, before, content_id)
            child = nodes.get(key)
            if child is None:
                child = nodes[key] = PrefixNode(key)
            num_before = child.num_longest if child.longest == replica else child.tokens_of(replica)
            if num_in_segment > num_before:
                child.lengthen(replica, num_in_segment)
                self.num_tokens[replica] += num_in_segment - num_before
            node, before = child, num_in_segment
        self._touch(replica, node)
        if self.num_tokens[replica] > self._max_tokens:
            while self.num_tokens[replica] > self._max_tokens:
                self._forget(replica, next(iter(self._used[replica])))
            self._note_smaller(replica)

    def _note_smaller(self, replica: int) -> None:
        """Records that a replica has fewer tokens than before."""
        heappush(self._sizes, (self.num_tokens[replica], self._places[replica], replica))
        if len(self._sizes) > 4 * len(self._places):
            self._list_sizes()

    def _touch(self, replica: int, node: PrefixNode) -> None:
        """Marks the path to a node as used: the end first, so that it is forgotten first."""
        used = self._used[replica]
        while node.key is not None:
            used[node] = None
            used.move_to_end(node)
            node = node.key[0]

    def _forget(self, replica: int, node: PrefixNode) -> None:
        """Removes a replica from a node; the replica must have none of the nodes below it."""
        del self._used[replica][node]
        self.num_tokens[replica] -= node.forget(replica)
        if node.longest is None:
            assert node.key is not None
            del self._nodes[node.key]
