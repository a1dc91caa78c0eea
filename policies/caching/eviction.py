"""Eviction orders of a cache: the interface, the orders, and the entries that can be evicted now.

An order is a sort key of an entry, which is a leaf of the radix tree. The cache keeps its entries in
`Candidates`, which computes keys with the order and takes the smallest. `Lru`, the default of vLLM and
SGLang, `Lfu`, `Fifo`, `Priority` and `Belady` have no state; `SizeAware`, `TwoQ` and `S3Fifo` have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from typing import ClassVar, Generic, NamedTuple, Protocol, Self, TypeVar

from fieldlimits import Checked, NonNegative, Share


class Entry(Protocol):
    """A cached entry as an eviction order sees it. Stamps count cache operations; they are not times."""

    @property
    def last_access(self) -> int:
        """Stamp of the last match or insert that used the entry."""

    @property
    def inserted(self) -> int:
        """Stamp of its creation, unique in the cache; therefore every key ends with it."""

    @property
    def hits(self) -> int:
        """Number of inserts that created the entry or passed through it: about one per request."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that its eviction frees."""

    @property
    def depth(self) -> int:
        """Number of tokens before its first token."""

    @property
    def priority(self) -> int:
        """The highest priority of the inserts through it; entries of larger priority are kept longer."""

    @property
    def queue(self) -> int:
        """The queue that `Eviction.admit` or `reprieve` returned for the entry."""

    @property
    def content_id(self) -> int:
        """Hash of the tokens up to the entry's first one, equal for equal content."""

    @property
    def next_use(self) -> float:
        """Index of the next request that uses it; inf: none. Known only in an offline replay."""


class Eviction(Protocol):
    """An eviction order. Every method except `key` has a default for orders without state."""

    __slots__ = ()

    is_offline: ClassVar[bool] = False
    """Whether the order needs the future requests, which are unknown to engines."""
    num_queues: ClassVar[int] = 1

    def key(self, entry: Entry) -> tuple[float, ...]:
        """Returns the sort key of an entry: the smallest of its queue is evicted first.

        Is called before the next eviction after the entry became a candidate or was used.
        """
        ...

    def fresh(self) -> Self:
        """Returns a copy of the order without state; every cache uses its own."""
        return self

    def admit(self, entry: Entry) -> int:
        """Returns the queue that a new entry joins, 0 to num_queues - 1."""
        return 0

    def victim_queue(self, queue_tokens: Sequence[int]) -> int:
        """Returns the queue of the next victim; if it has no candidate, the other queues follow in order.

        queue_tokens: tokens in each queue, locked and inner entries included.
        """
        return 0

    def reprieve(self, entry: Entry) -> int | None:
        """Returns the queue that a victim joins instead of being evicted; None: it is evicted.

        If it joins a queue, its key is computed and `victim_queue` is called again. No entry may be spared
        forever.
        """
        return None

    def evicted(self, entry: Entry, key: tuple[float, ...], queue_tokens: Sequence[int]) -> None:
        """Is called after every eviction. key: the entry's key; queue_tokens: tokens per queue afterwards."""
        return None


class Ghosts:
    """The ids of evicted contents and their numbers of tokens."""

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}  # by content id, the oldest first
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def recall(self, content_id: int) -> bool:
        """Removes an id because its content is inserted again; returns whether it was stored."""
        num_tokens = self._tokens.pop(content_id, None)
        if num_tokens is None:
            return False
        self._num_tokens -= num_tokens
        return True

    def remember(self, content_id: int, num_tokens: int, max_num_tokens: float) -> None:
        """Adds an id as the newest and removes the oldest ids beyond max_num_tokens tokens."""
        self._num_tokens += num_tokens - self._tokens.pop(content_id, 0)
        self._tokens[content_id] = num_tokens
        while self._num_tokens > max_num_tokens:
            oldest = next(iter(self._tokens))
            self._num_tokens -= self._tokens.pop(oldest)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lru(Eviction):
    """Least recently used first; there are no settings.

    Assumes that recently used content will be used again. Of the entries that one request used at the same
    time, the deepest is evicted first, so the prefix stays cached.
    """

    def key(self, entry: Entry) -> tuple[float, ...]:
        """Returns the sort key: last access, then the deepest first, then age."""
        return entry.last_access, -entry.depth, entry.inserted


@dataclass(frozen=True, kw_only=True, slots=True)
class Lfu(Eviction):
    """Least frequently used first, ties by least recent use; there are no settings.

    Assumes that popularity is stable: counts never decay, so content that was popular once is kept for long
    (`SizeAware` ages its counts). Evicted content that is inserted again starts with a count of one.
    """

    def key(self, entry: Entry) -> tuple[float, ...]:
        """Returns the sort key: hits, then as `Lru`."""
        return entry.hits, entry.last_access, -entry.depth, entry.inserted


@dataclass(frozen=True, kw_only=True, slots=True)
class Fifo(Eviction):
    """First in, first out: evicts the oldest entry, used or not; there are no settings.

    Assumes nothing about reuse; a baseline. If a radix tree splits a node, its first half counts as new.
    """

    def key(self, entry: Entry) -> tuple[float, ...]:
        """Returns the sort key: the oldest first."""
        return (entry.inserted,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Priority(Eviction):
    """Lowest priority first, ties by least recent use; there are no settings.

    Assumes that clients set priorities truthfully. An entry keeps the highest priority of the inserts through
    it, so a shared prefix has the priority of its most important request.
    """

    def key(self, entry: Entry) -> tuple[float, ...]:
        """Returns the sort key: priority, then as `Lru`."""
        return entry.priority, entry.last_access, -entry.depth, entry.inserted


@dataclass(frozen=True, kw_only=True, slots=True)
class Belady(Eviction):
    """Belady's MIN: evicts the entry with the latest next use (Belady, IBM Systems Journal 1966).

    This is an offline bound: it needs the order of all requests, so no engine can use it, and the cache needs
    them as an input (`future.FutureUses`). With entries of equal size it has the fewest misses of all orders:
    an entry's next use is never later than that of the entries after it on its path, so evicting only leaves
    is no restriction. With entries of different sizes, as in a radix tree, it is a reference, not a proven
    bound. It assumes that requests are served in the order of arrival; an engine that reorders them deviates
    from it.
    """

    is_offline: ClassVar[bool] = True

    def key(self, entry: Entry) -> tuple[float, ...]:
        """Returns the sort key: the latest next use first, then the deepest, then the oldest."""
        return -entry.next_use, -entry.depth, entry.inserted


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeAware(Checked, Eviction):
    """Settings of GreedyDual-Size, and the age for one cache.

    GreedyDual-Size with frequency: evicts the entry with the lowest value per freed token.

    Cao and Irani, USITS 1997; Cherkasova, HP Labs 1998:

        value = age + hits * cost / num_tokens,   cost = fixed_cost_tokens + num_tokens

    The cost of losing an entry is the number of tokens to recompute: its own, plus a fixed part for the
    prefill that a miss causes. Small and frequently used entries are therefore kept longer. `age` is the
    value of the last victim; it increases, so unused entries are evicted eventually.
    """

    fixed_cost_tokens: NonNegative = 512.0
    """Fixed part of the cost of a miss, in tokens; 0: least frequently used, with ageing."""
    _age: list[float] = field(init=False, hash=False, repr=False, default_factory=lambda: [0.0])

    def key(self, entry: Entry) -> tuple[float, ...]:
        """Returns the sort key: the value at the current age, then as `Lru`."""
        value = self._age[0] + entry.hits * (self.fixed_cost_tokens / entry.num_tokens + 1)
        return value, entry.last_access, -entry.depth, entry.inserted

    def fresh(self) -> Self:
        """Returns the same settings at age 0."""
        return replace(self)

    def evicted(self, entry: Entry, key: tuple[float, ...], queue_tokens: Sequence[int]) -> None:
        """Increases the age of the cache to the value of the victim."""
        self._age[0] = max(self._age[0], key[0])


PROBATION, MAIN = 0, 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoQ(Checked, Eviction):
    """Settings of 2Q (Kin and Kout in the paper), and the ghost entries of one cache.

    2Q, full version: new content joins a probation queue before it can join the main queue.

    Johnson and Shasha, VLDB 1994. New entries join a first-in-first-out probation queue. Evicted content of
    that queue that is inserted again while it has a ghost entry joins the main queue, which is LRU. Content
    that is used only once therefore evicts nothing from the main queue. Uses in the probation queue are not
    counted; they are treated as one burst.

    Memory pressure: victims are taken from the probation queue while it has more than its share, else from
    main. Ghost entries use no KV memory.
    """

    num_queues: ClassVar[int] = 2

    probation_share: Share = 0.25
    """Share of the cached tokens up to which the probation queue keeps its entries."""
    ghost_share: NonNegative = 0.5
    """Tokens of evicted content with a ghost entry, as a share of the cached tokens."""
    _ghosts: Ghosts = field(init=False, hash=False, repr=False, compare=False, default_factory=Ghosts)

    def key(self, entry: Entry) -> tuple[float, ...]:
        """Returns the sort key: first in, first out in the probation queue; as `Lru` in the main queue."""
        if entry.queue == PROBATION:
            return (entry.inserted,)
        return entry.last_access, -entry.depth, entry.inserted

    def fresh(self) -> Self:
        """Returns the same settings without ghost entries."""
        return replace(self)

    def admit(self, entry: Entry) -> int:
        """Returns the main queue for content with a ghost entry, else the probation queue."""
        return MAIN if self._ghosts.recall(entry.content_id) else PROBATION

    def victim_queue(self, queue_tokens: Sequence[int]) -> int:
        """Returns the probation queue while it has more than its share, else the main queue."""
        over = queue_tokens[PROBATION] > self.probation_share * sum(queue_tokens)
        return PROBATION if over else MAIN

    def evicted(self, entry: Entry, key: tuple[float, ...], queue_tokens: Sequence[int]) -> None:
        """Stores the id of content that was evicted from the probation queue."""
        if entry.queue == PROBATION:
            limit = self.ghost_share * (sum(queue_tokens) + entry.num_tokens)
            self._ghosts.remember(entry.content_id, entry.num_tokens, limit)


SMALL = 0
"""Number of the queue of new content; the other is `MAIN`."""
MAX_USES = 3
"""Maximum number of counted uses (2 bits)."""
PROMOTING_USES = 2
"""Number of uses in the small queue that promote an entry to the main one."""


class _Joined(NamedTuple):
    """The position at which an entry joined its queue, and its hits at that time."""

    position: int
    hits: int


@dataclass(frozen=True, kw_only=True, slots=True)
class S3Fifo(Checked, Eviction):
    r"""Settings of S3-FIFO, and its state for one cache.

    S3-FIFO: a small queue for new content, and a main queue in which used content is reinserted.

    Yang et al., SOSP 2023. All queues are first in, first out.

        new content ---> small ---> evicted, its id is stored as a ghost
                           | used twice or more                      \ inserted again while it is a ghost v v
                           main  ---> evicted if not used; else reinserted into main with one use less

    Uses are counted up to 3, in 2 bits, from the time at which an entry joined small or moved from small to
    main. In the paper's pseudo-code, the small queue keeps evicting after a promotion has evicted an entry
    from a full main queue; here the eviction stops after the first evicted entry.

    Assumes that most content is used once, and that reused content is reused soon. In a radix tree a use is a
    request that passes through the node. A locked node keeps its position in its queue. The first half of a
    split node rejoins its queue when it becomes a leaf, with its uses so far, up to 3. Memory pressure:
    victims are taken from the small queue while it has its share or more, else from main.
    """

    num_queues: ClassVar[int] = 2

    small_share: Share = 0.1
    """Share of the cached tokens below which the small queue keeps its entries."""
    ghost_share: NonNegative = 0.9
    """Tokens of evicted content with a ghost entry, as a share of the cached tokens; the same number as in
    main.
    """
    _joined: dict[int, _Joined] = field(
        init=False, hash=False, repr=False, compare=False, default_factory=dict
    )
    """Data of the entries in the cache, by `inserted`."""
    _num_joins: list[int] = field(
        init=False, hash=False, repr=False, compare=False, default_factory=lambda: [0]
    )
    _ghosts: Ghosts = field(init=False, hash=False, repr=False, compare=False, default_factory=Ghosts)

    def key(self, entry: Entry) -> tuple[float, ...]:
        """Returns the sort key: the position in its queue."""
        return (self._joined_of(entry).position,)

    def fresh(self) -> Self:
        """Returns the same settings without state."""
        return replace(self)

    def admit(self, entry: Entry) -> int:
        """Returns the main queue for content with a ghost entry, else the small queue."""
        self._join(entry, entry.hits)
        return MAIN if self._ghosts.recall(entry.content_id) else SMALL

    def victim_queue(self, queue_tokens: Sequence[int]) -> int:
        """Returns the small queue while it has its share or more, else the main queue."""
        has_share = queue_tokens[SMALL] >= self.small_share * sum(queue_tokens)
        return SMALL if has_share else MAIN

    def reprieve(self, entry: Entry) -> int | None:
        """Moves an entry with enough uses from small to main, and reinserts an entry with uses into main."""
        num_uses = min(MAX_USES, entry.hits - self._joined_of(entry).hits)
        if entry.queue == SMALL and num_uses >= PROMOTING_USES:
            self._join(entry, entry.hits)
            return MAIN
        if entry.queue == MAIN and num_uses:
            self._join(entry, entry.hits - (num_uses - 1))
            return MAIN
        return None

    def evicted(self, entry: Entry, key: tuple[float, ...], queue_tokens: Sequence[int]) -> None:
        """Stores the id of content that was evicted from the small queue."""
        del self._joined[entry.inserted]
        if entry.queue == SMALL:
            limit = self.ghost_share * (sum(queue_tokens) + entry.num_tokens)
            self._ghosts.remember(entry.content_id, entry.num_tokens, limit)

    def _join(self, entry: Entry, hits: int) -> None:
        self._num_joins[0] += 1
        self._joined[entry.inserted] = _Joined(self._num_joins[0], hits)

    def _joined_of(self, entry: Entry) -> _Joined:
        if entry.inserted not in self._joined:  # it was created by a split; its first hit is not a use
            self._join(entry, 1)
        return self._joined[entry.inserted]


class Candidate(Entry, Protocol):
    """An entry of `Candidates`. Only `Candidates` writes the last three attributes."""

    @property
    def is_candidate(self) -> bool:
        """True if it may be evicted now: it has no lock and no child, and is in the cache."""

    queue: int
    """Number of its queue; starts as 0."""
    version: int
    """Number of keys computed for it; starts as 0."""
    is_pending: bool
    """Whether it needs a new key; starts as False."""


C = TypeVar("C", bound=Candidate)
_MIN_SWEEP = 1024  # heap length below which outdated items are not removed


class Candidates(Generic[C]):
    """The candidates of one cache.

    The entries that can be evicted now, in the order of an eviction policy: heaps with lazy deletion.

    A use of an entry takes O(1): the entry is added to a list of entries that need a new key, and the list is
    added to the heaps at the next eviction. An outdated item of a heap is recognised by its version and
    dropped when it is at the top, so that an eviction takes O(log n) amortised.
    """

    def __init__(self, eviction: Eviction) -> None:
        self.eviction = eviction.fresh()
        self.queue_tokens = [0] * self.eviction.num_queues
        """Number of tokens in each queue."""
        self._heaps: list[list[tuple[tuple[float, ...], int, int, C]]] = [[] for _ in self.queue_tokens]
        self._sweep_at = [_MIN_SWEEP] * len(self._heaps)
        self._pending: list[C] = []

    def admit(self, entry: C) -> None:
        """Adds a new entry, which need not be a candidate, to its queue."""
        entry.queue = self.eviction.admit(entry)
        self.queue_tokens[entry.queue] += entry.num_tokens

    def offer(self, entry: C) -> None:
        """Records that an entry became a candidate, or that a candidate's key may have changed."""
        if not entry.is_pending:
            entry.is_pending = True
            self._pending.append(entry)

    def pop(self) -> C | None:
        """Removes and returns the entry to evict, which the cache must then drop; None without candidates."""
        if self._pending:
            self._take_keys()
        while (first := self._pop_first()) is not None:
            entry, key = first
            queue = self.eviction.reprieve(entry)
            self.queue_tokens[entry.queue] -= entry.num_tokens
            if queue is None:
                self.eviction.evicted(entry, key, self.queue_tokens)
                return entry
            entry.queue = queue
            self.queue_tokens[queue] += entry.num_tokens
            self._push(entry)
        return None

    def holds(self, entry: C) -> bool:
        """Returns whether `pop` would eventually return the entry; O(n), for integrity checks."""
        return entry.is_pending or any(
            item is entry and version == entry.version for heap in self._heaps for _, _, version, item in heap
        )

    def _pop_first(self) -> tuple[C, tuple[float, ...]] | None:
        """Removes and returns the first candidate with its key, from the victim queue or a later one."""
        first = self.eviction.victim_queue(self.queue_tokens) if len(self._heaps) > 1 else 0
        for offset in range(len(self._heaps)):
            heap = self._heaps[(first + offset) % len(self._heaps)]
            while heap:
                key, _, version, entry = heappop(heap)
                if version == entry.version and entry.is_candidate:
                    return entry, key
        return None

    def _push(self, entry: C) -> None:
        entry.version += 1
        key = self.eviction.key(entry)
        # `inserted` and the version differ, so that two entries are never compared.
        heappush(self._heaps[entry.queue], (key, entry.inserted, entry.version, entry))

    def _take_keys(self) -> None:
        for entry in self._pending:
            entry.is_pending = False
            if entry.is_candidate:
                self._push(entry)
        self._pending.clear()
        for queue, heap in enumerate(self._heaps):
            if len(heap) > self._sweep_at[queue]:
                heap[:] = [item for item in heap if item[2] == item[3].version and item[3].is_candidate]
                heapify(heap)
                self._sweep_at[queue] = max(_MIN_SWEEP, 2 * len(heap))
