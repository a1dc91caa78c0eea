"""Prefix caching over several tiers: what the GPU evicts is found again in host memory, and then on disk.

As LMCache, vLLM's offloading connector, SGLang's HiCache and Mooncake do it. A prompt's hits are looked for
on the GPU first, then, from the first miss on, in host memory, then on disk. What is found below is loaded
while others compute: the sequence has its slot and blocks, and joins the running when the copies are done.
write=back: contents go down when they are evicted from the tier above. write=through: they are copied to host
memory when they are computed, so that eviction costs nothing, and more is written. Lower tiers keep what they
have loaded; each evicts the pieces of text that were used longest ago, the end of a piece first.

Memory pressure: as prefix caching. Horizon: as there, but a step that evicts stands alone where that means a
copy, and so does a step with prompt chunks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from policies.caching.pool import Caching, KvMemory, check_watermark
from policies.caching.prefix import Held, PrefixPool, Run
from policies.sequence import Sequence

GIB = 2.0**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiered(Caching):
    """Settings of a prefix cache with tiers below the GPU's memory."""

    watermark: float = 0.0
    """Share of all blocks that an admission must leave free while others run."""
    host_gib: float = 64.0
    """Host memory a GPU for contents."""
    disk_gib: float = 0.0
    """Disk a GPU for contents."""
    write: str = "back"
    """When contents go down: back (when evicted) or through (when computed)."""
    min_load_tokens: int = 256
    """Fewer tokens than that are computed rather than loaded."""

    def __post_init__(self) -> None:
        Caching.__post_init__(self)
        check_watermark(self.watermark)
        if self.write not in ("back", "through"):
            raise ValueError(f"write={self.write}: must be back or through")
        for name in ("host_gib", "disk_gib"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)}: must be a finite number >= 0 GiB")
        if self.disk_gib and not self.host_gib:
            raise ValueError(
                f"host_gib=0, disk_gib={self.disk_gib:g}: contents reach the disk through host memory; "
                "set host_gib, or disk_gib=0"
            )
        if self.min_load_tokens < 1:
            raise ValueError(f"min_load_tokens={self.min_load_tokens}: must be >= 1 token")

    @property
    def tiers_gib(self) -> tuple[float, float]:
        return self.host_gib, self.disk_gib

    def pool(self, memory: KvMemory) -> TieredPool:
        """An empty pool. Raises ValueError where the bytes of a token are not known."""
        if not memory.bytes_per_token > 0:
            raise ValueError("bytes_per_token=0: the size of tiers in blocks depends on it")
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


class Piece(NamedTuple):
    """The blocks first to end - 1 of a place."""

    place: int
    first: int
    end: int


class Tier:
    """Contents in one tier, by place; never more than num_blocks blocks."""

    def __init__(self, name: str, num_blocks: int) -> None:
        self.name = name
        self.num_blocks = num_blocks
        self.num_used = 0
        self._at: OrderedDict[int, list[tuple[int, int]]] = (
            OrderedDict()
        )  # place -> [first, end), least used first

    @property
    def places(self) -> set[int]:
        """Where it has contents."""
        return set(self._at)

    def reach(self, place: int, first: int) -> int:
        """Up to which block, without a gap from block `first` on, it has a place's contents."""
        for one, end in self._at.get(place, ()):
            if one <= first < end:
                return end
        return first

    def touch(self, place: int) -> None:
        """Contents were used."""
        if place in self._at:
            self._at.move_to_end(place)

    def put(self, piece: Piece) -> tuple[int, list[Piece]]:
        """Store what it does not have yet; returns how many blocks that were, and what had to go."""
        place, first, end = piece
        held = self._at.setdefault(place, [])
        self._at.move_to_end(place)
        before = sum(e - f for f, e in held)
        merged: list[tuple[int, int]] = []
        for f, e in sorted([*held, (first, end)]):
            if merged and f <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(e, merged[-1][1]))
            else:
                merged.append((f, e))
        held[:] = merged
        num_new = sum(e - f for f, e in held) - before
        self.num_used += num_new
        return num_new, self._evict()

    def _evict(self) -> list[Piece]:
        evicted = []
        while self.num_used > self.num_blocks:
            place, held = next(iter(self._at.items()))
            first, end = held.pop()
            num_blocks = min(end - first, self.num_used - self.num_blocks)
            if num_blocks < end - first:
                held.append((first, end - num_blocks))
            if not held:
                del self._at[place]
            self.num_used -= num_blocks
            evicted.append(Piece(place, end - num_blocks, end))
        return evicted


class TieredPool(PrefixPool):
    """A prefix pool that writes down what it evicts, or computes, and finds it again."""

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
        self._tiers = tiers
        self._writes_through = writes_through
        self._min_load_tokens = min_load_tokens
        self._found_below: dict[int, list[tuple[str, Piece]]] = {}  # request id -> tier and what it has

    @property
    def chunks_stand_alone(self) -> bool:
        return True

    @property
    def num_quiet(self) -> int:
        """Free blocks whose use copies nothing."""
        return self._num_fresh if self._tiers and not self._writes_through else self.num_free

    def num_loadable(self, seq: Sequence, num_cached: int) -> int:
        found: list[tuple[str, Piece]] = []
        block = num_cached // self.block_size
        limit = (seq._known - 1) // self.block_size
        start = 0
        for place, end in self._held(seq).path:
            upto = min(end, limit) - start
            at = block - start
            while 0 <= at < upto:
                tier, reach = next(
                    ((tier, r) for tier in self._tiers if (r := tier.reach(place, at)) > at), (None, at)
                )
                if tier is None:
                    break
                reach = min(reach, upto)
                found.append((tier.name, Piece(place, at, reach)))
                at = reach
            if at > block - start:
                block = start + at
            if at < upto or block >= limit:
                break
            start = end
        num_tokens = sum(piece.end - piece.first for _, piece in found) * self.block_size
        if num_tokens < self._min_load_tokens:
            found, num_tokens = [], 0
        self._found_below[seq.request_id] = found
        return num_tokens

    def loads(self, seq: Sequence) -> list[tuple[str, int]]:
        by_tier: dict[str, int] = {}
        for name, piece in self._found_below.pop(seq.request_id, ()):
            by_tier[name] = by_tier.get(name, 0) + (piece.end - piece.first) * self.block_size
            for tier in self._tiers:
                tier.touch(piece.place)
        return list(by_tier.items())

    def release(self, seq: Sequence, num_tokens: int, num_planned: int = 0) -> None:
        self._found_below.pop(seq.request_id, None)
        super().release(seq, num_tokens, num_planned)

    def _used_places(self) -> set[int]:
        return super()._used_places().union(*(tier.places for tier in self._tiers))

    def _offer_stretch(self, seq: Sequence, held: Held, place: int, first: int, end: int) -> None:
        super()._offer_stretch(seq, held, place, first, end)
        if self._writes_through:
            self._write(0, "gpu", [Piece(place, first, end)])

    def _evicted(self, run: Run, num_blocks: int) -> None:
        if not run.is_copy and not self._writes_through:
            self._write(0, "gpu", [Piece(run.place, run.end - num_blocks, run.end)])

    def _write(self, index: int, source: str, pieces: Iterable[Piece]) -> None:
        """Copy pieces down into a tier, and what has to make way there into the next."""
        if index >= len(self._tiers):
            return
        tier = self._tiers[index]
        for piece in pieces:
            num_new, evicted = tier.put(piece)
            if num_new:
                self.stores.append((source, tier.name, num_new * self.block_size))
            self._write(index + 1, tier.name, evicted)
