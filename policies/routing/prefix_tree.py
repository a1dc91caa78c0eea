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
from typing import NamedTuple

from policies.request import Segment


class Match(NamedTuple):
    """The longest prefix of a prompt that some replica was sent, and a replica that was."""

    num_tokens: int
    replica: int | None


class PrefixNode:
    """A piece of content at one place."""

    __slots__ = ("children", "longest", "name", "parent", "tokens")

    def __init__(self, parent: PrefixNode | None, name: tuple[int, int]) -> None:
        self.parent = parent
        self.name = name  # tokens taken of the parent, content id
        self.children: dict[tuple[int, int], PrefixNode] = {}
        self.tokens: dict[int, int] = {}  # by replica: the longest run that it was sent
        self.longest: int | None = None  # the replica of the longest run, the first of equals


class PrefixTree:
    """Prompts by replica, for those that `keep_only` was told of last.

    num_tokens of each is at most max_tokens after every `insert`.
    """

    def __init__(self, max_tokens: int) -> None:
        self.num_tokens: dict[int, int] = {}
        self._max_tokens = max_tokens
        self._root = PrefixNode(None, (0, 0))
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

    def match(self, runs: Sequence[Segment]) -> Match:
        """The longest prefix, and the replica of the longest run at its end, whose path is marked as used."""
        node, before, num_tokens = self._root, 0, 0
        for content_id, num_run in runs:
            child = node.children.get((before, content_id))
            if child is None:
                break
            node, before = child, num_run
            assert child.longest is not None
            num_found = child.tokens[child.longest]
            if num_found < num_run:
                num_tokens += num_found
                break
            num_tokens += num_run
        if node.longest is None:
            return Match(0, None)
        self._touch(node.longest, node)
        return Match(num_tokens, node.longest)

    def insert(self, runs: Sequence[Segment], replica: int) -> None:
        """Note that a prompt was sent to a replica."""
        node, before = self._root, 0
        for content_id, num_run in runs:
            name = (before, content_id)
            child = node.children.get(name)
            if child is None:
                child = node.children[name] = PrefixNode(node, name)
            num_before = child.tokens.get(replica, 0)
            if num_run > num_before:
                child.tokens[replica] = num_run
                self.num_tokens[replica] += num_run - num_before
                if child.longest is None or num_run > child.tokens[child.longest]:
                    child.longest = replica
            node, before = child, num_run
        self._touch(replica, node)
        while self.num_tokens[replica] > self._max_tokens:
            self._forget(replica, next(iter(self._used[replica])))

    def _touch(self, replica: int, node: PrefixNode) -> None:
        """Mark the path to a node as used: the end first, so that it is forgotten first."""
        used = self._used[replica]
        while node.parent is not None:
            used[node] = None
            used.move_to_end(node)
            node = node.parent

    def _forget(self, replica: int, node: PrefixNode) -> None:
        """A replica's node without any of its nodes below."""
        del self._used[replica][node]
        self.num_tokens[replica] -= node.tokens.pop(replica)
        if not node.tokens:
            assert node.parent is not None
            del node.parent.children[node.name]
            node.longest = None
        elif node.longest == replica:
            node.longest = max(node.tokens, key=lambda other: (node.tokens[other], -other))
