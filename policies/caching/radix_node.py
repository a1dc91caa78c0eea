"""A node of the radix tree, and functions for the segments of nodes.

    prompt    (7, 4) (9, 6)               segments (content id, tokens)
    tokens    7 7 7 7 9 9 9 9 9 9
    edges     [7 7 7 7 9 9] -> [9 9 9 9]  split, because another prompt is (7, 4) (9, 2) (5, 8)
    stored    segments=((7, 4), (9, 2)), skip=0     segments=((9, 6),), skip=2

The lengths in a node's segments count from the first token of the segment, of which `skip` tokens may be in
the parent node.
"""

from __future__ import annotations

from policies.caching.content import NO_HISTORY, FutureUses, extend_history
from policies.core.request import Segment

Segments = tuple[Segment, ...]
Key = tuple[int, int] | tuple[tuple[int, int, int], ...]


class Node:
    """A node of the tree and the edge to it: an eviction `Entry`. Only the tree may change it."""

    __slots__ = (
        "_future",
        "_history",
        "_key",
        "children",
        "depth",
        "hits",
        "ids",
        "inserted",
        "is_pending",
        "last_access",
        "lock_count",
        "num_tokens",
        "parent",
        "priority",
        "queue",
        "segments",
        "skip",
        "version",
    )

    def __init__(self, segments: Segments, skip: int, num_tokens: int, depth: int, stamp: int) -> None:
        self.segments, self.skip, self.num_tokens, self.depth = segments, skip, num_tokens, depth
        self.inserted = self.last_access = stamp
        self.parent: Node | None = None  # None for the root and for evicted nodes
        self.children: dict[Key, Node] = {}
        self.lock_count = self.hits = self.priority = 0
        self.queue = self.version = 0
        self.is_pending = False
        self.ids: list[int] = []  # physical blocks, once assigned
        self._key: Key = ()
        self._future: FutureUses | None = None
        self._history: int | None = None

    @property
    def num_prefix_tokens(self) -> int:
        """Number of tokens from the root to the node's end."""
        return self.depth + self.num_tokens

    @property
    def is_candidate(self) -> bool:
        """True if the node is an unlocked leaf."""
        return not self.children and self.lock_count == 0 and self.parent is not None

    @property
    def history(self) -> int:
        """Hash of the whole segments before the node's first segment (`eviction.future.extend_history`)."""
        node, below = self, []
        while node._history is None and node.parent is not None:
            below.append(node)
            node = node.parent
        history = node._history or NO_HISTORY
        for child in reversed(below):
            # A segment that continues in the child is not before it.
            segments = node.segments[:-1] if child.skip else node.segments
            history = child._history = extend_history(history, segments)
            node = child
        return history

    @property
    def content_id(self) -> int:
        """Hash of the tokens up to the node's first one, included."""
        return hash((self.history, self.segments[0][0], self.skip))

    @property
    def next_use(self) -> float:
        """Index of the next request that uses the node's first token; inf if there is none."""
        assert self._future is not None, "the tree was created without the future requests"
        return self._future.next_use(self.history, self.segments[0][0], self.skip + 1)


def child_key(segments: Segments, first: int, skip: int, page_size: int) -> Key:
    """Returns the key of the page of tokens that begins `skip` tokens into segments[first]."""
    content_id, end = segments[first]
    if end - skip >= page_size:
        return content_id, skip
    pieces, missing = [], page_size
    while missing:
        content_id, end = segments[first]
        taken = min(end - skip, missing)
        pieces.append((content_id, skip, skip + taken))
        missing -= taken
        first, skip = first + 1, 0
    return tuple(pieces)


def locate(segments: Segments, num_tokens: int) -> tuple[int, int]:
    """Finds the token after the first num_tokens tokens: returns its segment and its position there."""
    first = 0
    while first < len(segments) and num_tokens >= segments[first][1]:
        num_tokens -= segments[first][1]
        first += 1
    return first, num_tokens


def num_shared(edge: Segments, ahead: Segments, skip: int) -> int:
    """Counts the equal tokens of an edge and a prompt, from `skip` tokens into their first segment."""
    num_tokens = -skip
    for (edge_id, edge_end), (content_id, end) in zip(edge, ahead, strict=False):
        if edge_id != content_id:
            break
        num_tokens += min(edge_end, end)
        if edge_end != end:
            break
    return num_tokens
