"""The adapters that one engine has on its GPU, their users, and the adapters being loaded.

    disk -> host -> coming -> in use <-> idle -> evicted: overwritten by the next one

Adapters do not change while they are served, so evicting one copies nothing: its source still exists.
No sequence is preempted for an adapter, and an adapter in use is never evicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from itertools import islice
from typing import ClassVar

from policies.adapters.registry import Registry
from policies.core.plan import AdapterLoad, AdapterUse, Chunk
from policies.core.sequence import Sequence
from policies.core.sequence_view import SequenceView
from policies.core.step import StepBuilder
from policies.core.view import StepView


class AdapterCounts:
    """Counts of an engine's adapter events since the start."""

    __slots__ = ("loaded_bytes", "num_evicted", "num_hits", "num_loads", "num_loads_from_disk", "num_starts")

    def __init__(self) -> None:
        self.num_starts = 0  # sequences that got a slot, also again after a preemption
        self.num_hits = 0  # of these, those whose adapter was resident
        self.num_loads = 0
        self.num_loads_from_disk = 0
        self.loaded_bytes = 0.0
        self.num_evicted = 0


class Residents:
    """Tracks adapters and their users; a policy's subclass decides on room and on which sequence may start.

    The calls for a sequence, whatever its adapter, are in this order:
        check                   it arrives: its adapter must be served
        wait, unwait            it joins the queue, or leaves it without a slot
        may_start, num_missing  may it have a slot now, and which blocks of KV memory would its adapter take?
        must_wait, start        it has got a slot, and uses its adapter; must it wait for the adapter?
        loaded                  an adapter is loaded: sequences that waited for it go on
        stop                    it has lost its slot
    """

    merges: ClassVar[bool] = False
    """Whether an adapter becomes part of the weights."""

    def __init__(
        self,
        registry: Registry,
        *,
        eviction: str = "lru",
        max_host: int | None = None,
        num_prefetched: int = 0,
    ) -> None:
        self.registry = registry
        self.counts = AdapterCounts()
        self.num_blocks = 0
        """Number of KV blocks that adapters hold."""
        self.has_changed = False
        """Whether adapters were loaded or evicted since the last plan.

        The next plan then holds for one step.
        """
        self._by_uses = eviction == "lfu"
        self._max_host = len(registry) if max_host is None else max_host
        self._num_prefetched = num_prefetched
        self._users: Counter[str] = Counter()  # sequences with a slot, by adapter
        self._idle: dict[str, None] = {}  # resident and not in use, the least recently used first
        self._resident: set[str] = set()
        self._loading: dict[str, list[Sequence]] = {}  # being loaded, with the sequences that wait for it
        self._host: dict[str, None] = {}  # in host memory, the least recently loaded first
        self._waiting: dict[str, int] = {}  # sequences in the queue; adapters in the order of the first
        self._uses: Counter[str] = Counter()
        self._loads: list[AdapterLoad] = []
        self._puts: list[tuple[str, int | None]] = []

    @property
    def is_loading(self) -> bool:
        """Whether an adapter is being loaded."""
        return bool(self._loading)

    def is_resident(self, name: str) -> bool:
        """Whether an adapter is on the GPU, or being loaded."""
        return name in self._resident or name in self._loading

    @property
    def resident(self) -> frozenset[str]:
        """Adapters that are on the GPU."""
        return frozenset(self._resident)

    def slot_of(self, name: str) -> int | None:
        """The slot of a resident adapter, for policies that have slots; else None."""
        return None

    def check(self, name: str | None) -> int:
        """Number of KV blocks that a request with this adapter takes in addition to its own.

        Raises RejectedError for an adapter that is not served.
        """
        if name is None:
            return 0
        self.registry.find(name)
        return self._blocks_of(name)

    def wait(self, seq: SequenceView) -> None:
        """Counts a sequence that has joined the queue."""
        name = self._key(seq)
        if name is not None:
            self._waiting[name] = self._waiting.get(name, 0) + 1

    def unwait(self, seq: SequenceView) -> None:
        """Counts a sequence that has left the queue."""
        name = self._key(seq)
        if name is not None:
            self._waiting[name] -= 1
            if not self._waiting[name]:
                del self._waiting[name]

    def before_step(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Called before a step is made: adapters may be loaded and evicted."""
        if self._num_prefetched and self._waiting:
            self._prefetch(view)

    def may_start(self, seq: SequenceView) -> bool:
        """Whether the adapter slots allow a waiting sequence to start."""
        name = self._key(seq)
        return name is None or self.is_resident(name) or self._fits_without_idle(name)

    def num_missing(self, seq: SequenceView) -> int:
        """Number of KV blocks that the adapter of a waiting sequence would take."""
        name = self._key(seq)
        return 0 if name is None or self.is_resident(name) else self._blocks_of(name)

    def num_idle_blocks(self, but: SequenceView | None = None) -> int:
        """Number of KV blocks of unused adapters, except the adapter of the sequence `but`."""
        if not self.num_blocks:
            return 0
        kept = None if but is None else self._key(but)
        return sum(self._blocks_of(name) for name in self._idle if name != kept)

    def must_wait(self, seq: SequenceView) -> bool:
        """Whether a sequence that starts has to wait for its adapter."""
        name = self._key(seq)
        return name is not None and name not in self._resident

    def start(self, seq: Sequence) -> None:
        """Counts a sequence that leaves the queue with a slot; its adapter is loaded if necessary."""
        self.unwait(seq)
        name = self._key(seq)
        if name is None:
            return
        self.counts.num_starts += 1
        self._uses[name] += 1
        self._users[name] += 1
        if name in self._resident:
            self.counts.num_hits += 1
            self._idle.pop(name, None)
            return
        if name not in self._loading:
            self._load(name)
        self._loading[name].append(seq)

    def stop(self, seq: Sequence) -> None:
        """Counts a sequence that has lost its slot."""
        name = self._key(seq)
        if name is None:
            return
        waiters = self._loading.get(name)
        if waiters is not None and seq in waiters:
            waiters.remove(seq)
        self._users[name] -= 1
        if not self._users[name]:
            del self._users[name]
            if name in self._resident and not self._stays(name):
                self._idle[name] = None

    def waiters(self, name: str) -> SequenceOf[Sequence]:
        """Sequences with a slot that wait for an adapter being loaded."""
        return self._loading.get(name, ())

    def loaded(self, name: str) -> list[Sequence]:
        """Marks an adapter as loaded; returns the sequences that waited for it."""
        waiters = self._loading.pop(name)
        self._resident.add(name)
        if not self._users[name] and not self._stays(name):
            self._idle[name] = None
        return waiters

    def evict_until(self, is_enough: Callable[[], bool], keep: str | None = None) -> bool:
        """Evicts unused adapters from KV memory, one after the other, until there is enough room.

        Returns whether there is.
        """
        while not is_enough():
            victim = self._victim(keep) if self.num_blocks else None
            if victim is None:
                return False
            self._evict(victim)
        return True

    def take_loads(self) -> list[AdapterLoad]:
        """Returns the adapter loads since the last call."""
        loads, self._loads = self._loads, []
        return loads

    def take_puts(self) -> tuple[tuple[str, int | None], ...]:
        """Returns the adapters that were assigned since the last call, with their slots, for the plan."""
        puts, self._puts = tuple(self._puts), []
        return puts

    def use(self, decodes: Iterable[SequenceView], chunks: Iterable[Chunk]) -> AdapterUse | None:
        """The adapter computation of a step; None if there is none."""
        tokens: Counter[str] = Counter()
        for seq in decodes:
            if seq.request.adapter is not None:
                tokens[seq.request.adapter] += seq.width
        for chunk in chunks:
            if chunk.seq.request.adapter is not None:
                tokens[chunk.seq.request.adapter] += chunk.num_tokens
        if not tokens:
            return None
        ranks = [self._padded_rank(name) for name in tokens]
        return AdapterUse(
            num_adapters=len(tokens),
            num_tokens=tokens.total(),
            num_rank_tokens=sum(rank * num for rank, num in zip(ranks, tokens.values(), strict=True)),
            num_ranks=sum(ranks),
        )

    def check_integrity(self, running: Iterable[SequenceView]) -> None:
        """Asserts that used adapters are resident or loading, users are counted, and no block is lost."""
        users = Counter(name for name in map(self._key, running) if name is not None)
        assert users == self._users, "an adapter's users are counted wrong"
        assert all(self.is_resident(name) for name in users), "an adapter was evicted while it was in use"
        assert not self._resident & self._loading.keys()
        idle = {name for name in self._resident if not users[name] and not self._stays(name)}
        assert idle == set(self._idle), "an adapter that nobody uses cannot make room"
        held = sum(self._blocks_of(name) for name in (*self._resident, *self._loading))
        assert held == self.num_blocks, "blocks of an adapter are lost"

    # Decisions of policies.

    def _key(self, seq: SequenceView) -> str | None:
        """The adapter that a sequence needs; None: it needs none."""
        return seq.request.adapter

    def _num_bytes(self, name: str) -> float:
        """Bytes of an adapter to be loaded, over all devices."""
        return self.registry.num_bytes(name)

    def _blocks_of(self, name: str) -> int:
        """Number of KV blocks that an adapter takes."""
        return 0

    def _stays(self, name: str) -> bool:
        """Whether an adapter is kept although it is unused."""
        return False

    def _padded_rank(self, name: str) -> int:
        """The rank that kernels compute with."""
        return self.registry.find(name).rank

    def _fits(self, name: str) -> bool:
        """Whether there is room for an adapter now."""
        raise NotImplementedError

    def _fits_beside(self, name: str, view: StepView) -> bool:
        """Whether there is room for an adapter that is prefetched."""
        return self._fits(name)

    def _fits_without_idle(self, name: str) -> bool:
        """Whether there would be room after evicting unused adapters."""
        return bool(self._idle) or self._fits(name)

    def _enter(self, name: str) -> int | None:
        """Assigns free room to an adapter; returns its slot, if it has one."""
        return None

    def _leave(self, name: str) -> None:
        """Frees the room of an adapter."""

    def _victim(self, keep: str | None = None) -> str | None:
        """The adapter to evict: an unused one, if possible without waiting requests.

        None if there is none.
        """
        idle = [name for name in self._idle if name != keep]
        unwanted = [name for name in idle if name not in self._waiting]
        candidates: Iterator[str] = iter(unwanted or idle)
        if self._by_uses:  # ties go to the first: the least recently used
            return min(candidates, key=self._uses.__getitem__, default=None)
        return next(candidates, None)

    def _evict(self, name: str) -> None:
        del self._idle[name]
        self._resident.remove(name)
        self._leave(name)
        self.counts.num_evicted += 1
        self.has_changed = True

    def _load(self, name: str) -> None:
        """Starts the load of an adapter; evicts unused ones to make room."""
        while not self._fits(name):
            victim = self._victim(name)
            assert victim is not None, "an adapter is to be loaded without room"
            self._evict(victim)
        slot = self._enter(name)
        source = self._touch_host(name)
        num_bytes = self._num_bytes(name)
        self._loads.append(AdapterLoad(name, source, num_bytes, slot, self.merges))
        self._puts.append((name, slot))
        self._loading[name] = []
        self.counts.num_loads += 1
        self.counts.loaded_bytes += num_bytes
        self.has_changed = True

    def _touch_host(self, name: str) -> str:
        """Tier from which an adapter is read.

        Afterwards it is in host memory, too, perhaps in place of another.
        """
        if name in self._host:
            self._host[name] = self._host.pop(name)
            return "host"
        self._host[name] = None
        if len(self._host) > self._max_host:
            del self._host[next(iter(self._host))]
        self.counts.num_loads_from_disk += 1
        return "disk"

    def _prefetch(self, view: StepView) -> None:
        """Loads adapters of waiting requests in order of arrival, into room that no other adapter needs."""
        wanted = islice((name for name in self._waiting if name not in self._resident), self._num_prefetched)
        for name in [name for name in wanted if name not in self._loading]:
            while not self._fits_beside(name, view):
                victim = self._victim()
                if victim is None or victim in self._waiting:
                    return
                self._evict(victim)
            self._load(name)
