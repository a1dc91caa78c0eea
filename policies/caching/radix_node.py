"""A node of the radix tree, and the arithmetic of runs that the tree is made of.

    prompt    (7, 4) (9, 6)               runs
    token     7 7 7 7 9 9 9 9 9 9
    edges     [7 7 7 7 9 9] -> [9 9 9 9]  a prompt (7, 4) (9, 2) (5, 8) came by: the edge was split
    stored    runs=((7, 4), (9, 2)), skip=0     runs=((9, 6),), skip=2

A node's runs name where each run ends, counted from the run's own first token; `skip` tokens of the first run
lie in front of the node.
"""

from __future__ import annotations

from policies.caching.eviction.future import NO_HISTORY, FutureUses, extend_history
from policies.core.request import Segment

Runs = tuple[Segment, ...]
Key = tuple[int, int] | tuple[tuple[int, int, int], ...]


class Node:
    """An edge of the tree and its end. Outside of the tree it is read-only; it is an eviction `Entry`."""

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
        "runs",
        "skip",
        "version",
    )

    def __init__(self, runs: Runs, skip: int, num_tokens: int, depth: int, stamp: int) -> None:
        self.runs, self.skip, self.num_tokens, self.depth = runs, skip, num_tokens, depth
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
        """Whether it is an unlocked leaf."""
        return not self.children and self.lock_count == 0 and self.parent is not None

    @property
    def history(self) -> int:
        """Hash over the whole runs in front of the node's first run (`eviction.future.extend_history`)."""
        node, below = self, []
        while node._history is None and node.parent is not None:
            below.append(node)
            node = node.parent
        history = node._history or NO_HISTORY
        for child in reversed(below):
            runs = node.runs[:-1] if child.skip else node.runs  # a run that goes on is not in front yet
            history = child._history = extend_history(history, runs)
            node = child
        return history

    @property
    def content_id(self) -> int:
        """A hash of the tokens up to and including the node's first."""
        return hash((self.history, self.runs[0][0], self.skip))

    @property
    def next_use(self) -> float:
        """Index of the next request that uses the node's first token; inf if there is none."""
        assert self._future is not None, "the tree was not given the requests to come"
        return self._future.next_use(self.history, self.runs[0][0], self.skip + 1)


def child_key(runs: Runs, first: int, skip: int, page_size: int) -> Key:
    """Key of the page of tokens that begins `skip` tokens into run `first`."""
    content_id, end = runs[first]
    if end - skip >= page_size:
        return content_id, skip
    pieces, missing = [], page_size
    while missing:
        content_id, end = runs[first]
        taken = min(end - skip, missing)
        pieces.append((content_id, skip, skip + taken))
        missing -= taken
        first, skip = first + 1, 0
    return tuple(pieces)


def locate(runs: Runs, num_tokens: int) -> tuple[int, int]:
    """The run that contains the token behind the first num_tokens tokens, and its position there."""
    first = 0
    while first < len(runs) and num_tokens >= runs[first][1]:
        num_tokens -= runs[first][1]
        first += 1
    return first, num_tokens


def num_shared(edge: Runs, ahead: Runs, skip: int) -> int:
    """Number of tokens that an edge and a prompt share, from `skip` tokens into their common first run."""
    num_tokens = -skip
    for (edge_id, edge_end), (content_id, end) in zip(edge, ahead, strict=False):
        if edge_id != content_id:
            break
        num_tokens += min(edge_end, end)
        if edge_end != end:
            break
    return num_tokens
