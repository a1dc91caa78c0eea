"""One contiguous region of KV memory per sequence, reserved at admission: the method before paging.

Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023,
sections 3.1 and 6.1, compare with such systems. The reserved length is one of:

    max_model_len   the longest sequence of the model (FasterTransformer; Orca (Max) in the paper)
    max_tokens      prompt + the client's limit on output tokens
    predicted       prompt + predicted output (S3: Jin et al., NeurIPS 2023); with exact predictions Orca
                    (Oracle), with the output rounded up to a power of two Orca (Pow2)

A sequence that reaches the end of its region gets one of twice the length: in place, if the memory after it
is free; else, with `moves`, at another address. If neither is possible, it is preempted and requests twice
the length at its next admission (S3, section 3).

    region   |--- filled ---|--- filled later: reserved ---|--- never filled: internal ---|
    memory   |  region  |  free  |     region     | free |        free: external, if too short

Assumes that the blocks of a region are contiguous and cannot be shared: no forks, no prefix reuse. Memory
pressure: an admission without a region of its length is refused, even if all free pieces together would
suffice. Horizon: regions change only at admissions, ends and limits, each of which ends the repetition of a
plan.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from fieldlimits import OneOf
from policies.caching.pool import BlockPool, Caching, KvMemory
from policies.caching.regions import Buddy, FirstFit, Region, RegionAllocator
from policies.core.sequence import Growth, Sequence

RESERVES = ("max_model_len", "max_tokens", "predicted")
ALLOCATORS = ("first_fit", "best_fit", "buddy")


@dataclass(frozen=True, kw_only=True, slots=True)
class Contiguous(Caching):
    """Settings of a cache of contiguous regions."""

    reserve: Annotated[str, OneOf(RESERVES)] = "max_model_len"
    """Number of tokens reserved for a sequence: max_model_len, max_tokens or predicted."""
    pow2_output: bool = False
    """Whether the output tokens reserved are rounded up to a power of two."""
    allocator: Annotated[str, OneOf(ALLOCATORS)] = "first_fit"
    """Placement of a region: first_fit, best_fit or buddy."""
    moves: bool = False
    """Whether a sequence that cannot grow in place is copied to a longer region; the copy takes no time."""
    block_size: int = 16
    """Tokens per block; regions are whole blocks."""

    def __post_init__(self) -> None:
        Caching.__post_init__(self)
        if self.pow2_output and self.reserve == "max_model_len":
            raise ValueError(
                "pow2_output=True: must be False with reserve=max_model_len, which reserves no output length"
            )

    @property
    def needs_predictor(self) -> bool:
        """True if the cache reads `Sequence.num_predicted_tokens`."""
        return self.reserve == "predicted"

    def pool(self, memory: KvMemory) -> RegionPool:
        """Creates an empty pool."""
        allocator: RegionAllocator
        if self.allocator == "buddy":
            allocator = Buddy(memory.num_blocks)
        else:
            allocator = FirstFit(memory.num_blocks, best_fit=self.allocator == "best_fit")
        return RegionPool(self, allocator, memory.max_model_len)


@dataclass(slots=True)
class Holding:
    """The pool's record of a sequence, which is kept after a preemption."""

    num_wanted: int
    """Number of tokens of its next region."""
    region: Region | None = None
    """Its region in blocks; None while it waits."""
    since: int = 0
    """Iteration since which the region has had this length."""
    met_fragments: bool = False
    """Whether, while it waited, enough blocks were free but not contiguous."""


class RegionPool(BlockPool):
    """A pool in which a sequence's blocks are one region of an allocator, all taken at admission."""

    can_fork: ClassVar[bool] = False

    def __init__(self, settings: Contiguous, allocator: RegionAllocator, max_model_len: int) -> None:
        super().__init__(allocator.num_tokens, settings.block_size)
        self.unfilled = array("q")
        self.num_fragmented = 0
        """Admissions that waited because enough blocks were free but not contiguous."""
        self.num_moved_tokens = 0
        """Number of tokens with KV that was copied to a longer region."""
        self._settings = settings
        self._allocator = allocator
        self._capacity = allocator.largest_free * settings.block_size
        self._max_model_len = max_model_len
        self._since: dict[int, int] = {}  # per region, by request id: see `Holding.since`

    @property
    def unfilled_since(self) -> int:
        """Earliest first iteration of rows that may still be added to `unfilled`."""
        return min(self._since.values(), default=self.num_iterations)

    @property
    def max_tokens_per_seq(self) -> int:
        """Number of tokens in the longest region of the empty memory."""
        return self._capacity

    def can_admit(self, seq: Sequence, num_cached: int, is_alone: bool) -> bool:
        """Returns whether there is a free region of the length that a waiting sequence needs."""
        holding = self._holding(seq)
        num_blocks = self._num_blocks(seq, holding)
        fits = num_blocks <= self._allocator.largest_free
        if not fits and num_blocks <= self.num_free and not holding.met_fragments:
            holding.met_fragments = True
            self.num_fragmented += 1
        return fits

    def blocks_to_admit(self, seq: Sequence) -> int:
        """Returns the number of blocks of the region that a waiting sequence needs."""
        return self._num_blocks(seq, self._holding(seq))

    def admit(self, seq: Sequence, num_cached: int) -> None:
        """Allocates the region of a sequence that can be admitted."""
        holding = self._holding(seq)
        region = self._allocator.allocate(self._num_blocks(seq, holding))
        assert region is not None
        self._place(seq, holding, region)
        holding.met_fragments = False

    def blocks_to_grow(self, seq: Sequence, num_held: int, num_tokens: int) -> int:
        """Returns 0, because the region already has the blocks."""
        return 0

    def growth(self, seq: Sequence) -> Growth | None:
        """Returns growth up to the end of the region. At the end, doubles the region or returns None."""
        holding = self._holding(seq)
        if seq.stored_computed >= self._room(holding) and not self._double(seq, holding):
            return None
        room = self._room(holding)
        is_enough = room >= seq.max_num_tokens - 1  # the last token's KV is never stored
        return Growth(takes_blocks=False, until=None if is_enough else room)

    def release(self, seq: Sequence, num_tokens: int, num_planned: int = 0) -> None:
        """Frees the region of a sequence and records the slots that were never filled."""
        holding = self._holding(seq)
        assert holding.region is not None
        num_unfilled = self._room(holding) - (num_tokens - num_planned)
        if num_unfilled > 0 and self.num_iterations > holding.since:
            assert self.unfilled is not None
            self.unfilled.extend((holding.since, self.num_iterations, num_unfilled))
        self._allocator.free(holding.region)
        holding.region = None
        del self._since[seq.request_id]
        self.num_free = self._allocator.num_free
        seq.block_ids = []

    def blocks_held(self, seq: Sequence, num_tokens: int) -> int:
        """Returns the number of blocks of its region, regardless of the tokens in it."""
        region = self._holding(seq).region
        return 0 if region is None else region.num_tokens

    def block_ids(self, seq: Sequence, num_tokens: int) -> list[int]:
        """Returns the ids of all blocks of its region, which are consecutive."""
        region = self._holding(seq).region
        if region is not None and not seq.block_ids:
            seq.block_ids = list(range(region.start + 1, region.end + 1))
        return seq.block_ids

    def check_integrity(self, held: Iterable[tuple[Sequence, int]]) -> None:
        """Asserts that regions tile the memory, hold their sequences' tokens, and account for every block."""
        held = list(held)
        super().check_integrity(held)
        self._allocator.check_integrity()
        assert self.num_free == self._allocator.num_free
        for seq, num_tokens in held:
            assert num_tokens <= self._room(self._holding(seq)), f"{seq!r} is longer than its region"

    def _holding(self, seq: Sequence) -> Holding:
        """Returns the record of a sequence; creates it, with the reservation, at the first call."""
        holding = seq.kv
        if holding is None:
            holding = seq.kv = Holding(self._reservation(seq))
        assert isinstance(holding, Holding)
        return holding

    def _reservation(self, seq: Sequence) -> int:
        """Computes the number of tokens that a sequence reserves at its first admission.

        The number may exceed the memory.
        """
        settings, num_prompt = self._settings, seq.num_prompt_tokens
        if settings.reserve == "max_model_len":
            return self._max_model_len
        longest = seq.max_num_tokens - num_prompt
        num_output = min(seq.num_predicted_tokens, longest) if settings.reserve == "predicted" else longest
        if settings.pow2_output:
            num_output = 1 << (num_output - 1).bit_length()
        return num_prompt + num_output

    def _num_blocks(self, seq: Sequence, holding: Holding) -> int:
        """Computes the blocks of the region that a waiting sequence needs, at least for all known tokens."""
        return self.blocks_for(min(max(holding.num_wanted, seq.stored_known), self._capacity))

    def _room(self, holding: Holding) -> int:
        """Returns the number of tokens of its region."""
        return 0 if holding.region is None else holding.region.num_tokens * self.block_size

    def _double(self, seq: Sequence, holding: Holding) -> bool:
        """Tries to double the filled region of a sequence; returns whether that was possible."""
        region, room = holding.region, self._room(holding)
        assert region is not None
        holding.num_wanted = min(2 * room, seq.max_num_tokens, self._capacity)
        num_blocks = self.blocks_for(holding.num_wanted)
        longer = self._allocator.grow(region, num_blocks)
        if longer is None and self._settings.moves:
            longer = self._allocator.allocate(num_blocks)
            if longer is not None:
                self._allocator.free(region)
                self.num_moved_tokens += room
        if longer is None:
            return False
        self._place(seq, holding, longer)
        return True

    def _place(self, seq: Sequence, holding: Holding, region: Region) -> None:
        """Records a new region of a sequence, or the new length of its region."""
        holding.region = region
        holding.since = self._since[seq.request_id] = self.num_iterations
        self.num_free = self._allocator.num_free
        seq.block_ids = []
