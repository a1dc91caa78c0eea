"""Radix tree over token sequences: the KV of shared prefixes is stored once (SGLang, NeurIPS 2024).

A sequence is a tuple of segments, `Segment(content_id, num_tokens)`. Two tokens are equal if their segments
have the same id, their positions in the segments are equal, and all tokens before them are equal. A stream of
token ids is a tuple of segments of one token each. The time is O(segments), not O(tokens).

Matches, inserts and edges end at multiples of `page_size` tokens (see the picture at `Node`).

Assumes that equal ids mean equal tokens. Memory pressure: `evict` removes whole unlocked leaves, in the order
of an eviction policy, and may free more tokens than requested. Horizon: a match becomes longer only by
inserts and shorter only by evictions; neither happens while a plan is repeated.

Stamps, splits and hit counts follow SGLang's RadixCache, so that both evict the same leaves; comments mark
the details.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from policies.caching.content import NO_HISTORY, FutureUses, extend_history
from policies.caching.eviction import Candidates, Eviction, Lru
from policies.core.request import Segment
from policies.user_code import name_of

Segments = tuple[Segment, ...]
Key = tuple[int, int] | tuple[tuple[int, int, int], ...]


class Node:
    """A node of the tree and the edge to it: an eviction `Entry`. Only the tree may change it.

        prompt    (7, 4) (9, 6)               segments (content id, tokens)
        tokens    7 7 7 7 9 9 9 9 9 9
        edges     [7 7 7 7 9 9] -> [9 9 9 9]  split, because another prompt is (7, 4) (9, 2) (5, 8)
        stored    segments=((7, 4), (9, 2)), skip=0     segments=((9, 6),), skip=2

    The lengths in a node's segments count from the first token of the segment, of which `skip` tokens may be
    in the parent node.
    """

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
        """Hash of the tokens up to and including the node's first one."""
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
    """Finds the token after the first num_tokens tokens; returns its segment and its position there."""
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


class Match(NamedTuple):
    """The longest cached prefix: its tokens, and the node at its end (the root for 0 tokens)."""

    num_tokens: int
    node: Node


class Lookup:
    """A prompt that may be looked up repeatedly (a waiting request's), with its last result."""

    __slots__ = ("max_tokens", "next_key", "node", "segments")

    def __init__(self, segments: Segments, max_tokens: int | None) -> None:
        self.segments = segments  # tokens that may be found: whole pages
        self.max_tokens = max_tokens
        self.node: Node | None = None  # end of the found prefix; None: not looked up yet
        self.next_key: Key | None = None  # key of the page after the prefix; None: the whole prompt was found


class Insertion(NamedTuple):
    """Result of an insert: the number of tokens that were not cached, and the node at the end of the path.

    The path has node.num_prefix_tokens tokens.
    """

    num_new_tokens: int
    node: Node


class RadixTree:
    """Cached prefixes of one replica.

    num_tokens = num_evictable + num_locked. The owner compares num_tokens with its memory and calls `evict`.
    """

    def __init__(
        self,
        *,
        page_size: int = 1,
        eviction: Eviction | None = None,
        future: FutureUses | None = None,
        on_evict: Callable[[Node], None] | None = None,
    ) -> None:
        """Creates an empty tree.

        eviction: `Lru` by default; the tree uses a `fresh` copy. future: needed by an offline eviction order.
        on_evict: called with each leaf before it is removed from the tree (`path` still has its content).
        """
        if page_size < 1:
            raise ValueError(f"page_size={page_size}: must be >= 1 token")
        eviction = Lru() if eviction is None else eviction
        if eviction.is_offline and future is None:
            raise ValueError(
                f"eviction={name_of(eviction)}: needs the future requests, future=FutureUses(...)"
            )
        self.page_size = page_size
        self.num_tokens = 0
        self.num_locked = 0
        self.root = Node((), 0, 0, 0, 0)
        self.root._history = NO_HISTORY
        self._future = future
        self._on_evict = on_evict
        self._candidates: Candidates[Node] = Candidates(eviction)
        self._stamp = 0

    @property
    def num_evictable(self) -> int:
        """Number of tokens without a lock; `evict` can free all of them."""
        return self.num_tokens - self.num_locked

    def match(self, segments: Segments, max_tokens: int | None = None) -> Match:
        """Returns the longest cached prefix of the first max_tokens tokens, in whole pages.

        Marks the nodes of the prefix as accessed. A node that continues beyond the prefix is split; the
        second half is marked as well.
        """
        return self.match_again(self.lookup(segments, max_tokens))

    def lookup(self, segments: Segments, max_tokens: int | None = None) -> Lookup:
        """Returns an object for `match_again`; it does not look up yet."""
        return Lookup(self._usable(segments, max_tokens)[0], max_tokens)

    def match_again(self, lookup: Lookup) -> Match:
        """Does the same as `match`, without comparing segments if the result is unchanged.

        The result is unchanged while the node at the end of the prefix is in the tree and has no child that
        continues it.
        """
        node = lookup.node
        is_gone = node is not self.root and (node is None or node.parent is None)
        if node is None or is_gone or lookup.next_key in node.children:
            node, first, skip = self._walk(lookup.segments, None, 0)
            is_whole = first == len(lookup.segments)
            lookup.node = node
            lookup.next_key = None if is_whole else child_key(lookup.segments, first, skip, self.page_size)
            return Match(node.num_prefix_tokens, node)
        stamp = self._next_stamp()
        above: Node | None = node
        while above is not None:
            above.last_access = stamp
            above = above.parent
        if not node.children:
            self._candidates.offer(node)
        return Match(node.num_prefix_tokens, node)

    def peek(self, segments: Segments, max_tokens: int | None = None) -> int:
        """Returns the number of tokens that `match` would find; changes nothing."""
        usable, _ = self._usable(segments, max_tokens)
        node, first, skip = self.root, 0, 0
        while first < len(usable):
            child = node.children.get(child_key(usable, first, skip, self.page_size))
            if child is None:
                break
            num_equal = num_shared(child.segments, usable[first : first + len(child.segments)], skip)
            num_equal -= num_equal % self.page_size
            if num_equal < child.num_tokens:
                return node.num_prefix_tokens + num_equal
            node = child
            first, skip = locate(usable, node.num_prefix_tokens)
        return node.num_prefix_tokens

    def insert(
        self,
        segments: Segments,
        num_tokens: int | None = None,
        *,
        priority: int = 0,
        num_counted_tokens: int = 0,
        above: Node | None = None,
    ) -> Insertion:
        """Inserts the path of the first num_tokens tokens, in whole pages.

        Tokens without a segment cannot be inserted. num_counted_tokens: tokens that the same request inserted
        before, for example in earlier chunks; nodes up to there get no second hit. above: a locked node of
        the path, up to which the request has already inserted. The nodes up to there are not visited and not
        marked as accessed, so the last insert before they are unlocked must omit it.
        """
        usable, total = self._usable(segments, num_tokens)
        node, first, skip = self._walk(usable, priority, num_counted_tokens, above)
        num_new = total - node.num_prefix_tokens
        if num_new:
            leaf = Node(usable[first:], skip, num_new, node.num_prefix_tokens, self._next_stamp())
            leaf._future = self._future
            leaf._key = child_key(usable, first, skip, self.page_size)
            leaf.priority = priority
            leaf.hits = int(total > num_counted_tokens)
            leaf.parent = node
            node.children[leaf._key] = leaf
            self.num_tokens += num_new
            self._candidates.admit(leaf)
            self._candidates.offer(leaf)
            node = leaf
        return Insertion(num_new, node)

    def lock(self, node: Node) -> None:
        """Locks the path from the root to a node; locks are counted. Raises ValueError if it was evicted."""
        self._check_alive(node)
        while node.parent is not None:
            if node.lock_count == 0:
                self.num_locked += node.num_tokens
            node.lock_count += 1
            node = node.parent

    def move_lock(self, node: Node, below: Node) -> None:
        """Moves a lock from a node to one below it, so that the path between them is locked as well."""
        while below is not node:
            assert below.parent is not None, "the lock must be moved to a node below"
            if below.lock_count == 0:
                self.num_locked += below.num_tokens
            below.lock_count += 1
            below = below.parent

    def unlock(self, node: Node) -> None:
        """Removes one lock of a node. Raises ValueError if there is none."""
        self._check_alive(node)
        if node is not self.root and node.lock_count == 0:
            raise ValueError("unlock: the node is not locked")
        while node.parent is not None:
            node.lock_count -= 1
            if node.lock_count == 0:
                self.num_locked -= node.num_tokens
                if not node.children:
                    self._candidates.offer(node)
            node = node.parent

    def evict(self, num_tokens: int) -> int:
        """Evicts whole leaves until at least num_tokens tokens are free, or no unlocked leaf is left.

        Returns the number of freed tokens. num_tokens may be 0 or negative.
        """
        num_freed = 0
        while num_freed < num_tokens:
            leaf = self._candidates.pop()
            if leaf is None:
                break
            if self._on_evict is not None:
                self._on_evict(leaf)
            parent = leaf.parent
            assert parent is not None
            del parent.children[leaf._key]
            leaf.parent = None
            num_freed += leaf.num_tokens
            self.num_tokens -= leaf.num_tokens
            if parent.is_candidate:
                self._candidates.offer(parent)
        return num_freed

    def path(self, node: Node) -> Segments:
        """Returns the segments from the root to the end of a node that is in the tree."""
        nodes = []
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        segments: list[Segment] = []
        for node in reversed(nodes):
            if node.skip:
                segments.pop()  # the node's first segment is the same one with a later end
            segments.extend(Segment(*segment) for segment in node.segments)
        return tuple(segments)

    def nodes(self) -> Iterator[Node]:
        """Yields every node except the root, parents first."""
        stack = [self.root]
        while stack:
            for child in stack.pop().children.values():
                yield child
                stack.append(child)

    def check_integrity(self) -> None:
        """Raises AssertionError if counts, links, locks or candidates disagree with the nodes."""
        num_tokens = num_locked = 0
        queue_tokens = [0] * len(self._candidates.queue_tokens)
        for node in self.nodes():
            parent = node.parent
            assert parent is not None
            assert parent.children[node._key] is node
            assert node._key == child_key(node.segments, 0, node.skip, self.page_size)
            assert node.num_tokens == sum(segment[1] for segment in node.segments) - node.skip > 0
            assert node.num_tokens % self.page_size == 0
            assert node.depth == parent.num_prefix_tokens
            assert node.lock_count >= sum(child.lock_count for child in node.children.values())
            assert node.last_access <= self._stamp
            assert not node.is_candidate or self._candidates.holds(node), "a leaf could never be evicted"
            if node.skip:
                assert parent.segments[-1] == (node.segments[0][0], node.skip), (
                    "a segment goes on where it did not end"
                )
            num_tokens += node.num_tokens
            num_locked += node.num_tokens if node.lock_count else 0
            queue_tokens[node.queue] += node.num_tokens
        assert (num_tokens, num_locked) == (self.num_tokens, self.num_locked)
        assert queue_tokens == self._candidates.queue_tokens

    def _next_stamp(self) -> int:
        self._stamp += 1
        return self._stamp

    def _check_alive(self, node: Node) -> None:
        if node.parent is None and node is not self.root:
            raise ValueError("node: must be in the tree; it was evicted because it was not locked")

    def _usable(self, segments: Segments, max_tokens: int | None) -> tuple[Segments, int]:
        """Returns the segments cut to max_tokens and to whole pages, and their number of tokens."""
        segments = tuple(segments)  # slices of it are compared with tuples
        lengths = [segment[1] for segment in segments]
        total = sum(lengths)
        if lengths and min(lengths) < 1:
            raise ValueError(f"num_tokens={min(lengths)}: a segment must have >= 1 token")
        target = total if max_tokens is None else max(0, min(total, max_tokens))
        target -= target % self.page_size
        if target == total:
            return segments, total
        count = len(segments)
        while count and total - lengths[count - 1] >= target:
            count -= 1
            total -= lengths[count]
        if total == target:
            return segments[:count], target
        last = Segment(segments[count - 1][0], lengths[count - 1] - (total - target))
        return (*segments[: count - 1], last), target

    def _walk(
        self, segments: Segments, priority: int | None, num_counted: int, above: Node | None = None
    ) -> tuple[Node, int, int]:
        """Follows `segments` as far as the tree has them, from the root or from a node above their rest.

        Marks the nodes as accessed. priority: None for a match, which does not count hits. Returns the last
        node, split if necessary, and the position of the first token after it: its segment, and the offset in
        the segment.
        """
        stamp, page_size = self._next_stamp(), self.page_size
        node, first, skip = self.root, 0, 0
        if above is not None:
            node, (first, skip) = above, locate(segments, above.num_prefix_tokens)
        is_split = False
        while first < len(segments) and not is_split:
            content_id, end = segments[first]
            whole = end - skip >= page_size  # as in `child_key`, which costs a call
            child = node.children.get(
                (content_id, skip) if whole else child_key(segments, first, skip, page_size)
            )
            if child is None:
                break
            child.last_access = stamp
            edge = child.segments
            ahead = segments[first : first + len(edge)]
            if ahead == edge:  # whole segments: the common case, compared in C
                first, skip = first + len(edge), 0
                node = child
            else:
                num_equal = num_shared(edge, ahead, skip)
                num_equal -= num_equal % page_size
                if num_equal < child.num_tokens:
                    node = self._split(child, num_equal)
                    # SGLang: the second half keeps this stamp, the first half gets a later one.
                    if not child.children:
                        self._candidates.offer(child)
                    is_split = True
                    first, skip = locate(segments, node.depth + num_equal)
                else:
                    node = child
                    first, skip = first + len(edge) - 1, edge[-1][1]  # the prompt's segment continues here
            if priority is not None:
                if priority > node.priority:
                    node.priority = priority
                node.hits += node.depth + node.num_tokens > num_counted
        if not node.children:
            self._candidates.offer(node)
        return node, first, skip

    def _split(self, node: Node, num_tokens: int) -> Node:
        """Splits a node after its first num_tokens tokens; returns the new first half.

        `node` becomes the second half, so that existing locks on it still cover the whole path.
        """
        parent = node.parent
        assert parent is not None
        first, end = locate(node.segments, node.skip + num_tokens)
        front_segments = node.segments[:first]
        if end:
            front_segments = (*front_segments, Segment(node.segments[first][0], end))
        front = Node(front_segments, node.skip, num_tokens, node.depth, self._next_stamp())
        front.parent, front._key = parent, node._key
        front._future, front._history = node._future, node._history
        front.lock_count, front.hits, front.priority = node.lock_count, node.hits, node.priority
        front.queue = node.queue
        parent.children[front._key] = front
        node.segments, node.skip = node.segments[first:], end
        front.ids, node.ids = (
            node.ids[: num_tokens // self.page_size],
            node.ids[num_tokens // self.page_size :],
        )
        node.num_tokens -= num_tokens
        node.depth += num_tokens
        node.parent, node._history = front, None
        node._key = child_key(node.segments, 0, node.skip, self.page_size)
        front.children[node._key] = node
        return front
