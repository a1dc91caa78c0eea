"""What a router has sent where: one tree of prompts for all replicas, each with what it was sent.

A node is a piece of content behind a given past: (node before, tokens taken of it, content). Of each replica
that was sent the piece it has the longest run of its tokens. So what branches off behind 5 tokens of a piece
and what branches off behind 9 are children of the same node, and nothing is ever split:

    sent to 0    7 7 7 7 7 9 9         7: {0: 5, 1: 8} --5--> 9: {0: 2}
    sent to 1    7 7 7 7 7 7 7 7 3                     --8--> 3: {1: 1}

A replica's tokens are those of its different prefixes. Above a limit the pieces sent longest ago are
forgotten, the end of a prompt before its beginning. Costs grow with the pieces of a prompt, not with the
number of replicas.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from heapq import heapify, heappush, heapreplace
from typing import NamedTuple

from policies.core.request import Segment


class PrefixNode:
    """A piece of content at one place. There are millions, so those of one replica have no dictionary."""

    __slots__ = ("key", "longest", "num_longest", "tokens")

    def __init__(self, key: tuple[PrefixNode, int, int] | None) -> None:
        self.key = key  # the node before, tokens taken of it, content id; None: the root
        self.longest: int | None = None  # the replica of the longest run, the first of equals
        self.num_longest = 0  # tokens of that run
        self.tokens: dict[int, int] | None = None  # of several replicas: the longest run that each was sent

    def tokens_of(self, replica: int) -> int:
        """The longest run that a replica was sent; 0: none."""
        if self.tokens is not None:
            return self.tokens.get(replica, 0)
        return self.num_longest if self.longest == replica else 0

    def lengthen(self, replica: int, num_tokens: int) -> None:
        """A replica is sent a longer run than before."""
        if self.tokens is not None:
            self.tokens[replica] = num_tokens
        elif self.longest is not None and self.longest != replica:
            self.tokens = {self.longest: self.num_longest, replica: num_tokens}
        if num_tokens > self.num_longest:
            self.longest, self.num_longest = replica, num_tokens

    def forget(self, replica: int) -> int:
        """A replica was sent none of it any more. Returns the tokens that it was."""
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
    """The longest prefix of a prompt that some replica was sent, and a replica that was; where it ends."""

    num_tokens: int
    replica: int | None
    node: PrefixNode


class PrefixTree:
    """Prompts by replica, for the replicas of the last call of `keep_only`.

    num_tokens of each is at most max_tokens after every `insert`.
    """

    def __init__(self, max_tokens: int) -> None:
        self.num_tokens: dict[int, int] = {}
        self._max_tokens = max_tokens
        self._places: dict[int, int] = {}  # by replica, its index in the last call of `keep_only`
        self._sizes: list[tuple[int, int, int]] = []
        """A heap of tokens, place and replica; each replica's least entry is what it has, or had before it
        grew."""
        self._root = PrefixNode(None)
        self._nodes: dict[tuple[PrefixNode, int, int], PrefixNode] = {}  # by key: a dict a node is too much
        self._used: dict[int, OrderedDict[PrefixNode, None]] = {}
        """By replica, its nodes, the one used longest ago first; a node comes behind all nodes below it."""

    def keep_only(self, replicas: Iterable[int]) -> None:
        """These replicas are there from now on; what was sent to others is forgotten."""
        kept = dict.fromkeys(replicas)
        for replica in [*self._used.keys() - kept.keys()]:
            for node in [*self._used[replica]]:  # the ends first
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
        """The replica with the fewest tokens; among equals the first one given to `keep_only`."""
        sizes = self._sizes
        while True:
            num_tokens, place, replica = sizes[0]
            num_now = self.num_tokens[replica]
            if num_now == num_tokens:
                return replica
            heapreplace(sizes, (num_now, place, replica))

    def match(self, runs: Sequence[Segment]) -> Match:
        """The longest prefix, and the replica of the longest run at its end; `use` marks it as used."""
        node, before, num_tokens, nodes = self._root, 0, 0, self._nodes
        for content_id, num_run in runs:
            child = nodes.get((node, before, content_id))
            if child is None:
                break
            node, before = child, num_run
            if child.num_longest < num_run:
                num_tokens += child.num_longest
                break
            num_tokens += num_run
        return Match(num_tokens, node.longest, node)

    def use(self, match: Match) -> None:
        """Mark the path of a match as used; it is the last that was made."""
        if match.replica is not None:
            self._touch(match.replica, match.node)

    def insert(self, runs: Sequence[Segment], replica: int) -> None:
        """Note that a prompt was sent to a replica, and mark it as used."""
        node, before, nodes = self._root, 0, self._nodes
        for content_id, num_run in runs:
            key = (node, before, content_id)
            child = nodes.get(key)
            if child is None:
                child = nodes[key] = PrefixNode(key)
            num_before = child.num_longest if child.longest == replica else child.tokens_of(replica)
            if num_run > num_before:
                child.lengthen(replica, num_run)
                self.num_tokens[replica] += num_run - num_before
            node, before = child, num_run
        self._touch(replica, node)
        if self.num_tokens[replica] > self._max_tokens:
            while self.num_tokens[replica] > self._max_tokens:
                self._forget(replica, next(iter(self._used[replica])))
            self._note_smaller(replica)

    def _note_smaller(self, replica: int) -> None:
        """A replica has fewer tokens than before."""
        heappush(self._sizes, (self.num_tokens[replica], self._places[replica], replica))
        if len(self._sizes) > 4 * len(self._places):
            self._list_sizes()

    def _touch(self, replica: int, node: PrefixNode) -> None:
        """Mark the path to a node as used: the end first, so that it is forgotten first."""
        used = self._used[replica]
        while node.key is not None:
            used[node] = None
            used.move_to_end(node)
            node = node.key[0]

    def _forget(self, replica: int, node: PrefixNode) -> None:
        """A replica's node without any of its nodes below."""
        del self._used[replica][node]
        self.num_tokens[replica] -= node.forget(replica)
        if node.longest is None:
            assert node.key is not None
            del self._nodes[node.key]
