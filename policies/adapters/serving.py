"""The LoRA adapters of an engine: the served ones, and the ones on its GPU.

    disk -> host memory -> loading -> in use <-> idle -> evicted

An eviction copies no data, because adapters do not change and are still on disk or in host memory. No
sequence is preempted for an adapter, and an adapter in use is never evicted. Adapters may be in KV memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, ClassVar, NamedTuple

from fieldlimits import Checked, MinLen, PositiveInt
from policies.core.limits import RejectedError
from policies.core.plan import AdapterLoad, AdapterUse, Chunk
from policies.core.sequence import Sequence, SequenceView
from policies.core.step import StepBuilder
from policies.core.view import StepView


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter(Checked):
    """A LoRA adapter on every matrix of attention and dense MLPs."""

    name: Annotated[str, MinLen(1), "because requests name the adapter"]
    rank: PositiveInt
    base_model: str | None = None
    """Model that the adapter was trained for; None: the served model."""


class AdapterMemory(NamedTuple):
    """Memory of adapters, over all GPUs of a replica."""

    bytes_per_rank: float = 0.0  # bytes of all matrices of an adapter, divided by its rank
    block_bytes: float = 0.0  # bytes of a KV block


class Registry:
    """The adapters that an engine serves, by name.

    Raises ValueError if two adapters have the same name, or if one was trained for another model.
    """

    def __init__(
        self, adapters: Iterable[Adapter], base_model: str, memory: AdapterMemory | None = None
    ) -> None:
        self.base_model = base_model
        self.memory = memory or AdapterMemory()
        self._adapters: dict[str, Adapter] = {}
        for adapter in adapters:
            self.add(adapter)

    def add(self, adapter: Adapter) -> None:
        """Adds an adapter. Raises the same ValueErrors as the class."""
        if adapter.name in self._adapters:
            raise ValueError(f"adapters: the name {adapter.name} occurs twice; give each its own name")
        if adapter.base_model not in (None, self.base_model):
            raise ValueError(
                f"adapters: {adapter.name} has base_model={adapter.base_model}: must be {self.base_model}, "
                "the served model; remove the adapter, or serve its model"
            )
        self._adapters[adapter.name] = adapter

    def __len__(self) -> int:
        return len(self._adapters)

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """All adapters, in the order given."""
        return tuple(self._adapters.values())

    @property
    def max_rank(self) -> int:
        """The largest rank; 0 without adapters."""
        return max((adapter.rank for adapter in self._adapters.values()), default=0)

    def find(self, name: str) -> Adapter:
        """Returns the adapter with this name. Raises RejectedError if there is none."""
        adapter = self._adapters.get(name)
        if adapter is None:
            few = ", ".join(list(self._adapters)[:5]) or "none"
            more = f" and {len(self) - 5} more" if len(self) > 5 else ""
            raise RejectedError(f"adapter={name}: must be one of the served adapters: {few}{more}")
        return adapter

    def num_bytes(self, name: str) -> float:
        """Returns the bytes of an adapter, over all GPUs."""
        return self._adapters[name].rank * self.memory.bytes_per_rank


class AdapterCounts:
    """Counts of an engine's adapter events since its start."""

    __slots__ = ("loaded_bytes", "num_evicted", "num_hits", "num_loads", "num_loads_from_disk", "num_starts")

    def __init__(self) -> None:
        self.num_starts = 0  # admissions of sequences with an adapter, including those after a preemption
        self.num_hits = 0  # admissions with a resident adapter
        self.num_loads = 0
        self.num_loads_from_disk = 0
        self.loaded_bytes = 0.0
        self.num_evicted = 0


class Residents:
    """Tracks adapters and their users; subclasses allocate memory and decide which sequences may start.

    The calls for a sequence, with or without an adapter, are in this order:
        check                    at its arrival: its adapter must be served
        join_queue, leave_queue it joins the queue, or leaves it without having run
        may_start, num_missing   whether it may be admitted, and the KV blocks that its adapter would take
        must_wait, start         it is admitted, and possibly waits for its adapter to be loaded
        loaded                   an adapter has been loaded: sequences that wait for it continue
        stop                     it has ended or has been preempted
    """

    merges: ClassVar[bool] = False
    """Whether adapters are merged into the weights."""

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
        """Number of KV blocks that adapters occupy."""
        self.has_changed = False
        """Whether adapters were loaded or evicted since the last plan; if so, the next plan holds for one
        step.
        """
        self._by_uses = eviction == "lfu"
        self._max_host = max_host  # None: all adapters
        self._num_prefetched = num_prefetched
        self._users: Counter[str] = Counter()  # number of running sequences, by adapter
        self._idle: dict[str, None] = {}  # resident and not in use, the least recently used first
        self._resident: set[str] = set()
        self._loading: dict[str, list[Sequence]] = {}  # being loaded, with the sequences that wait for it
        self._host: dict[str, None] = {}  # in host memory, the least recently loaded first
        self._waiting: dict[str, int] = {}  # queued sequences by adapter, ordered by the first one
        self._uses: Counter[str] = Counter()
        self._loads: list[AdapterLoad] = []
        self._puts: list[tuple[str, int | None]] = []

    @property
    def is_loading(self) -> bool:
        """True while an adapter is being loaded."""
        return bool(self._loading)

    def is_resident(self, name: str) -> bool:
        """Returns whether an adapter is on the GPU, or being loaded."""
        return name in self._resident or name in self._loading

    @property
    def resident(self) -> frozenset[str]:
        """Adapters that are on the GPU."""
        return frozenset(self._resident)

    def slot_of(self, name: str) -> int | None:
        """Returns the slot of an adapter if the policy has slots, else None."""
        return None

    def serve(self, adapter: Adapter) -> None:
        """Serves one more adapter from now on. Raises ValueError if its name is already in use."""
        self.registry.add(adapter)

    def check(self, name: str | None) -> int:
        """Returns the number of KV blocks of an adapter.

        Raises RejectedError for an adapter that is not served.
        """
        if name is None:
            return 0
        self.registry.find(name)
        return self._blocks_of(name)

    def join_queue(self, seq: SequenceView) -> None:
        """Counts a sequence that has joined the queue."""
        name = self._key(seq)
        if name is not None:
            self._waiting[name] = self._waiting.get(name, 0) + 1

    def leave_queue(self, seq: SequenceView) -> None:
        """Counts a sequence that has left the queue."""
        name = self._key(seq)
        if name is not None:
            self._waiting[name] -= 1
            if not self._waiting[name]:
                del self._waiting[name]

    def before_step(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Loads and evicts adapters if necessary; called before every step."""
        if self._num_prefetched and self._waiting:
            self._prefetch(view)

    def give_way(self) -> None:
        """Loads another adapter after a step in which nothing could run, if sequences can then start."""

    def may_start(self, seq: SequenceView) -> bool:
        """Returns whether a waiting sequence's adapter is resident, or could be loaded."""
        name = self._key(seq)
        return name is None or self.is_resident(name) or self._fits_evicting(name)

    def open_adapters(self) -> Collection[str | None] | None:
        """Returns the adapters for which `may_start` can be true now; None: any adapter, or no adapter.

        `None` in the collection stands for sequences without an adapter. With this result a queue need not be
        searched.
        """
        return None

    def num_missing(self, seq: SequenceView) -> int:
        """Returns the number of KV blocks to allocate for the adapter of a waiting sequence."""
        name = self._key(seq)
        return 0 if name is None or self.is_resident(name) else self._blocks_of(name)

    def num_idle_blocks(self, exclude: SequenceView | None = None) -> int:
        """Returns the number of KV blocks of unused adapters, without the adapter of sequence `exclude`."""
        if not self.num_blocks:
            return 0
        kept = None if exclude is None else self._key(exclude)
        return sum(self._blocks_of(name) for name in self._idle if name != kept)

    def must_wait(self, seq: SequenceView) -> bool:
        """Returns whether a sequence must wait for its adapter to be loaded."""
        name = self._key(seq)
        return name is not None and name not in self._resident

    def start(self, seq: Sequence) -> None:
        """Counts an admitted sequence as a user of its adapter, and loads the adapter if necessary."""
        self.leave_queue(seq)
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
        """Removes a sequence that has ended or was preempted from the users of its adapter."""
        name = self._key(seq)
        if name is None:
            return
        waiters = self._loading.get(name)
        if waiters is not None and seq in waiters:
            waiters.remove(seq)
        self._users[name] -= 1
        if not self._users[name]:
            del self._users[name]
            if name in self._resident and not self._is_pinned(name):
                self._idle[name] = None

    def waiters(self, name: str) -> SequenceOf[Sequence]:
        """Returns the admitted sequences that wait for an adapter being loaded."""
        return self._loading.get(name, ())

    def loaded(self, name: str) -> list[Sequence]:
        """Marks an adapter as loaded. Returns the sequences that waited for it."""
        waiters = self._loading.pop(name)
        self._resident.add(name)
        if not self._users[name] and not self._is_pinned(name):
            self._idle[name] = None
        return waiters

    def evict_until(self, is_enough: Callable[[], bool], keep: str | None = None) -> bool:
        """Evicts unused adapters from KV memory until is_enough() is true; returns whether it is.

        keep: an adapter that is not evicted.
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
        """Returns the adapters loaded since the last call with their slots, for the plan."""
        puts, self._puts = tuple(self._puts), []
        return puts

    def use(self, decodes: Iterable[SequenceView], chunks: Iterable[Chunk]) -> AdapterUse | None:
        """Returns the adapter computation of a step; None if there is none."""
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
        assert users == self._users, "the number of users of an adapter is wrong"
        assert all(self.is_resident(name) for name in users), "an adapter was evicted while it was in use"
        assert not self._resident & self._loading.keys()
        idle = {name for name in self._resident if not users[name] and not self._is_pinned(name)}
        assert idle == set(self._idle), "the idle adapters are not those without users"
        num_used = sum(self._blocks_of(name) for name in (*self._resident, *self._loading))
        assert num_used == self.num_blocks, "blocks of an adapter are lost"

    # Methods that policies override.

    def _key(self, seq: SequenceView) -> str | None:
        """Returns the adapter that a sequence needs; None: it needs none."""
        return seq.request.adapter

    def _num_bytes(self, name: str) -> float:
        """Returns the bytes that are loaded for an adapter, over all GPUs."""
        return self.registry.num_bytes(name)

    def _blocks_of(self, name: str) -> int:
        """Returns the number of KV blocks of an adapter; 0 if adapters are not in KV memory."""
        return 0

    def _is_pinned(self, name: str) -> bool:
        """Returns whether an adapter is never evicted."""
        return False

    def _padded_rank(self, name: str) -> int:
        """Returns the rank at which kernels compute an adapter."""
        return self.registry.find(name).rank

    def _fits(self, name: str) -> bool:
        """Returns whether an adapter can be loaded without an eviction."""
        raise NotImplementedError

    def _fits_prefetched(self, name: str, view: StepView) -> bool:
        """Returns whether an adapter can be prefetched without an eviction."""
        return self._fits(name)

    def _fits_evicting(self, name: str) -> bool:
        """Returns whether an adapter can be loaded, if necessary after an eviction."""
        return bool(self._idle) or self._fits(name)

    def _allocate(self, name: str) -> int | None:
        """Allocates memory for an adapter. Returns its slot if the policy has slots."""
        return None

    def _free(self, name: str) -> None:
        """Frees the memory of an adapter."""

    def _victim(self, keep: str | None = None) -> str | None:
        """Returns the unused adapter to evict, preferably one without waiting requests.

        None if there is none.
        """
        idle = [name for name in self._idle if name != keep]
        not_waited_for = [name for name in idle if name not in self._waiting]
        candidates: Iterator[str] = iter(not_waited_for or idle)
        if self._by_uses:  # ties go to the first, which is the least recently used
            return min(candidates, key=self._uses.__getitem__, default=None)
        return next(candidates, None)

    def _evict(self, name: str) -> None:
        del self._idle[name]
        self._resident.remove(name)
        self._free(name)
        self.counts.num_evicted += 1
        self.has_changed = True

    def _load(self, name: str) -> None:
        """Starts to load an adapter; evicts unused ones if necessary."""
        while not self._fits(name):
            victim = self._victim(name)
            assert victim is not None, "there is no memory for an adapter that is to be loaded"
            self._evict(victim)
        slot = self._allocate(name)
        source = self._touch_host(name)
        num_bytes = self._num_bytes(name)
        self._loads.append(AdapterLoad(name, source, num_bytes, slot, self.merges))
        self._puts.append((name, slot))
        self._loading[name] = []
        self.counts.num_loads += 1
        self.counts.loaded_bytes += num_bytes
        self.has_changed = True

    def _touch_host(self, name: str) -> str:
        """Returns the tier from which an adapter is loaded, and keeps the adapter in host memory."""
        if name in self._host:
            self._host[name] = self._host.pop(name)
            return "host"
        self._host[name] = None
        if self._max_host is not None and len(self._host) > self._max_host:
            del self._host[next(iter(self._host))]
        self.counts.num_loads_from_disk += 1
        return "disk"

    def _prefetch(self, view: StepView) -> None:
        """Loads adapters of waiting requests in order of arrival.

        Evicts only adapters without waiting requests.
        """
        wanted = islice((name for name in self._waiting if name not in self._resident), self._num_prefetched)
        for name in [name for name in wanted if name not in self._loading]:
            while not self._fits_prefetched(name, view):
                victim = self._victim()
                if victim is None or victim in self._waiting:
                    return
                self._evict(victim)
            self._load(name)
