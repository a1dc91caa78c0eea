"""Prefix caching over several tiers: KV evicted from the GPU is kept in host memory, then on disk.

As in LMCache, vLLM's offloading connector, SGLang's HiCache and Mooncake. A prompt is looked up on the GPU
first, then, from the first miss on, in host memory, then on disk. Hits in lower tiers are loaded while other
sequences compute: the sequence has its slot and blocks and starts to run when the loads are done.
write=back: contents are copied to the next tier when they are evicted. write=through: they are copied to host
memory when they are computed, so that eviction takes no time, but more is written. Lower tiers keep contents
that were loaded from them; each evicts the least recently used place (see `content`), its end first.

Memory pressure: as prefix caching. Horizon: as prefix caching, except that a step holds for one iteration if
it evicts blocks that must be copied, or has prompt chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Annotated, ClassVar

from fieldlimits import Ge, Lt, NonNegative, OneOf, PositiveInt, Unit
from policies.caching.content import ContentListener, Places
from policies.caching.pool import Caching, KvMemory
from policies.caching.prefix import PrefixPool
from policies.caching.runs import Holding, Run, Runs
from policies.caching.tier import Piece, ReportingTier, Tier, TierLedger
from policies.core.plan import Content, Transfer
from policies.core.sequence import Sequence

GIB = 2.0**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiered(Caching):
    """Settings of a prefix cache with tiers below the GPU's memory."""

    holds_states: ClassVar[bool] = True
    finds_prefixes: ClassVar[bool] = True

    watermark: Annotated[float, Ge(0), Lt(1), Unit("share")] = 0.0
    """Share of all blocks that an admission must leave free while other sequences run."""
    host_gib: Annotated[NonNegative, Unit("GiB")] = 64.0
    """Host memory for KV, in GiB per GPU."""
    disk_gib: Annotated[NonNegative, Unit("GiB")] = 0.0
    """Disk space for KV, in GiB per GPU."""
    write: Annotated[str, OneOf(("back", "through"))] = "back"
    """Time of the copy to lower tiers: back (when evicted) or through (when computed)."""
    min_load_tokens: Annotated[PositiveInt, Unit("token")] = 256
    """Minimum number of tokens to load; fewer tokens are recomputed instead."""

    def __post_init__(self) -> None:
        Caching.__post_init__(self)
        if self.disk_gib and not self.host_gib:
            raise ValueError(
                f"host_gib=0, disk_gib={self.disk_gib:g}: KV reaches the disk through host memory; set "
                "host_gib > 0, or disk_gib=0"
            )

    @property
    def tiers_gib(self) -> tuple[float, float]:
        return self.host_gib, self.disk_gib

    def pool(self, memory: KvMemory) -> TieredPool:
        """Creates an empty pool. Raises ValueError if the bytes per token are unknown."""
        if not memory.bytes_per_token > 0:
            raise ValueError("bytes_per_token=0: must be > 0; the sizes of the tiers in blocks depend on it")
        block_bytes = memory.bytes_per_token * self.block_size
        tiers = [
            Tier(name, int(gib * GIB * memory.num_devices / block_bytes))
            for name, gib in (("host", self.host_gib), ("disk", self.disk_gib))
        ]
        return TieredPool(
            memory.num_blocks,
            self.block_size,
            int(self.watermark * memory.num_blocks),
            tiers=[tier for tier in tiers if tier.num_blocks],
            writes_through=self.write == "through",
            min_load_tokens=self.min_load_tokens,
        )


class TieredPool(PrefixPool):
    """A prefix pool that copies evicted (or computed) blocks to lower tiers and looks up blocks there."""

    _counts_private = False

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_watermark_blocks: int,
        *,
        tiers: list[Tier],
        writes_through: bool,
        min_load_tokens: int,
    ) -> None:
        super().__init__(num_blocks, block_size, num_watermark_blocks)
        self._places = Places(block_size, is_per_segment=True)
        self._runs = Runs(self._free_ids, self._on_evict)
        self._tiers: list[Tier] = tiers
        self._writes_through = writes_through
        self._min_load_tokens = min_load_tokens
        self._found_below: dict[int, list[tuple[str, int, int, int]]] = {}  # request id -> tier, piece
        self._promised: dict[int, tuple[int, list[Piece]]] = {}
        """Request id -> (iteration, pieces that this iteration computes and puts into the first tier)."""
        self._ledger: TierLedger | None = None

    def report_to(self, listener: ContentListener) -> bool:
        self._tiers = [ReportingTier(tier.name, tier.num_blocks, listener) for tier in self._tiers]
        if self._ledger is not None:
            self.name_blocks()
        return super().report_to(listener)

    def take(self, num_blocks: int) -> None:
        super().take(num_blocks)
        self._runs.evict_pending()

    def clear_cache(self) -> None:
        """Evicts the contents of all free blocks without a copy; other tiers keep what they have."""
        tiers, self._tiers = self._tiers, []
        super().clear_cache()
        self._tiers = tiers

    @property
    def replans_chunks(self) -> bool:
        return True

    copies = True

    @property
    def num_free_without_copy(self) -> int:
        """Number of free blocks that are taken without a copy to another tier.

        They have no content, or content that is in a lower tier; of the latter only those of the next run are
        counted.
        """
        if not self._tiers or self._writes_through or not self._num_kept:
            return self.num_free
        run = self._runs.next_free
        return (
            self.num_free_without_content
            + run.end
            - max(run.first, self._tiers[0].reach_back(run.place, run.end))
        )

    def num_loadable(self, seq: Sequence, num_cached: int) -> int:
        block_size = self.block_size
        block, limit = num_cached // block_size, (seq.stored_known - 1) // block_size
        found: list[tuple[str, int, int, int]] = []
        num_found = start = 0
        for place, end in (seq.kv or self._new_held(seq)).path:
            if end > block:
                at, upto = block - start, (end if end < limit else limit) - start
                while at < upto:
                    for tier in self._tiers:
                        reach = tier.reach(place, at)
                        if reach > at:
                            break
                    else:
                        break
                    if reach > upto:
                        reach = upto
                    found.append((tier.name, place, at, reach))
                    num_found += reach - at
                    at = reach
                block = start + at
                if at < upto or block >= limit:
                    break
            start = end
        if num_found * block_size < self._min_load_tokens:
            found, num_found = [], 0
        self._found_below[seq.request_id] = found
        return num_found * block_size

    def loads(self, seq: Sequence) -> list[tuple[str, int]]:
        by_tier: dict[str, int] = {}
        for name, place, first, end in self._found_below.pop(seq.request_id, ()):
            by_tier[name] = by_tier.get(name, 0) + (end - first) * self.block_size
            for tier in self._tiers:
                tier.touch(place)
        return list(by_tier.items())

    def found_below(self, seq: Sequence) -> list[tuple[str, Content]]:
        found = self._found_below.get(seq.request_id, ())
        return [(name, (place, block)) for name, place, first, end in found for block in range(first, end)]

    def name_blocks(self) -> None:
        self._ledger = TierLedger(self._tiers, self.block_size)

    def named_stores(self, read: Set[tuple[str, Content]]) -> tuple[list[Transfer], list[Transfer]]:
        assert self._ledger is not None
        self.stores = []
        return self._ledger.transfers(read, self.num_iterations)

    def look_ahead(self, num_tokens: int) -> bool:
        """Does nothing: vLLM's connectors for other tiers identify blocks only by the blocks' own tokens."""
        return False

    def watch(self, num_readable: Callable[[Sequence], int]) -> None:
        """Does nothing: generated blocks are offered, and copied to other tiers, when their sequence ends."""

    def release(self, seq: Sequence, num_tokens: int, num_planned: int = 0) -> None:
        self._found_below.pop(seq.request_id, None)
        iteration, promised = self._promised.pop(seq.request_id, (-1, []))
        if num_planned and iteration == self.num_iterations:
            self._withdraw(promised)
        super().release(seq, num_tokens, num_planned)

    def _used_places(self) -> set[int]:
        return super()._used_places().union(*(tier.places for tier in self._tiers))

    def _offer_part(self, seq: Sequence, held: Holding, place: int, first: int, end: int) -> None:
        if not (self._writes_through and self._tiers):
            self._runs.offer(held, seq.request_id, place, first, end)
            return
        is_promise = held.num_with_content >= seq.stored_computed // self.block_size
        if self._ledger is not None:
            held.tail_ids += self.draw(end - first - len(held.tail_ids))
        ids = held.tail_ids[: end - first]
        self._runs.offer(held, seq.request_id, place, first, end)
        if is_promise:
            self._promise(seq, place, first, end)
        self._write((place, first, end), ids, self.num_iterations + is_promise)

    def _promise(self, seq: Sequence, place: int, first: int, end: int) -> None:
        """Records blocks that a sequence will have computed at the end of the current step."""
        iteration, pieces = self._promised.get(seq.request_id, (-1, []))
        if iteration != self.num_iterations:
            pieces = []
        pieces += [(place, *missing) for missing in self._tiers[0].missing(place, first, end)]
        self._promised[seq.request_id] = self.num_iterations, pieces

    def _withdraw(self, promised: list[Piece]) -> None:
        """Drops contents that will not be computed from all tiers."""
        for tier in self._tiers:
            for piece in promised:
                tier.drop(*piece)

    def _on_evict(self, run: Run, num_blocks: int) -> None:
        if run.is_copy or self._writes_through or not self._tiers:
            return
        self._write((run.place, run.end - num_blocks, run.end), run.ids[-num_blocks:], self.num_iterations)

    def _write(self, piece: Piece, ids: SequenceOf[int], ready: int) -> None:
        """Copies blocks from the GPU to the first tier, and the blocks evicted there to the next one.

        ids: physical ids of the blocks, if assigned. ready: iteration from which on they have their contents.
        """
        if self._ledger is not None:
            self._ledger.written(piece, ids, ready, self.num_iterations)
        source, pieces = "gpu", [piece]
        for tier in self._tiers:
            evicted: list[Piece] = []
            for piece in pieces:
                num_new, gone = tier.put(*piece)
                if num_new:
                    self.stores.append((source, tier.name, num_new * self.block_size))
                    if gone:
                        evicted += gone
            if not evicted:
                return
            if self._ledger is not None:
                self._ledger.evicted(evicted)
            source, pieces = tier.name, evicted
