"""Paged KV cache: fixed-size blocks handed out on demand (PagedAttention, Kwon et al., SOSP 2023).

Memory pressure: blocks are taken only when enough are free; who must give blocks back is the scheduling
policy's choice. Horizon: free blocks only shrink between ends, so a plan that could not admit a request cannot
admit it later in the same leap.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from policies.decode_set import PAGED, Growth
from policies.sequence import Sequence


class KvMemory(NamedTuple):
    """The memory that a pool manages."""

    num_blocks: int  # on the GPU, of `block_size` tokens each
    bytes_per_token: float = 0.0  # of KV, over all layers and heads
    max_model_len: int = 2**31  # prompt and output tokens of one sequence


def check_paging(block_size: int, watermark: float) -> None:
    """Raise ValueError for what no paged cache can be."""
    if block_size < 1:
        raise ValueError(f"block_size={block_size}: must be >= 1 token")
    if not 0 <= watermark < 1:
        raise ValueError(f"watermark={watermark}: must be >= 0 and < 1 (a share of all blocks)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Paged:
    """Settings of the paged cache."""

    changes_outputs: ClassVar[bool] = False

    block_size: int = 16
    """Tokens in a block."""
    watermark: float = 0.0
    """Share of all blocks that an admission must leave free while others run, so that they can grow."""
    presume_cached: bool = False
    """Every full block of a prompt but its last is there already; nothing is looked up.

    For measured runs that send a few prompts over and over to an engine with prefix caching. The blocks are
    not shared: each sequence takes its own.
    """

    def __post_init__(self) -> None:
        check_paging(self.block_size, self.watermark)

    def pool(self, memory: KvMemory) -> BlockPool:
        """An empty pool."""
        pool = BlockPool(memory.num_blocks, self.block_size, int(self.watermark * memory.num_blocks))
        pool.presume_cached = self.presume_cached
        return pool


class BlockPool:
    """Counts free blocks, and names them when somebody wants to know which.

    Physical ids are drawn when asked for (`block_ids`): a GPU engine asks at every step, the simulator never
    does. Ids run from 1 to num_blocks; block 0 is the null block.

        num_blocks = num_free + blocks owned by sequences;  ids drawn by a sequence <= blocks it owns

    The life of a sequence's KV here:
        num_cached, num_loadable, can_admit
                                look: what would be found, and is there room for all its known tokens?
        admit                   it holds what was found
        grow                    it holds the tokens up to a number, chunk by chunk
        growth                  its prefill is done: how it will go on; asked again at every limit it names
        take                    decodes need so many blocks, whoever they are
        release                 it holds nothing
    """

    can_fork: ClassVar[bool] = True
    """Whether sequences may share the blocks of what they have in common."""
    unfilled: array[int] | None = None
    """Of a pool that reserves ahead: token places that were never filled; None where none are reserved.

    Rows of three: from which iteration on they were held, before which they were given back, how many.
    """

    def __init__(self, num_blocks: int, block_size: int, num_watermark_blocks: int = 0) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks}: must be >= 1")
        self.num_iterations = 0  # that the engine has committed; it says so
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_watermark_blocks = num_watermark_blocks
        self.num_free = num_blocks
        self.presume_cached = False
        self.num_evicted = 0
        """Blocks whose content was given up for another; a pool without contents has none to give up."""
        self._free_ids = list(range(num_blocks, 0, -1))  # a stack: the last freed is the next used

    @property
    def num_used(self) -> int:
        """Blocks owned by sequences."""
        return self.num_blocks - self.num_free

    @property
    def max_tokens_per_seq(self) -> int:
        """Known tokens with which a sequence alone in the pool can still be admitted."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens tokens."""
        return -(-num_tokens // self.block_size)

    def num_cached(self, seq: Sequence) -> int:
        """Tokens of a waiting sequence whose KV is here already: whole blocks, never all that are known."""
        if not self.presume_cached:
            return 0
        return (seq.num_prompt_tokens - 1) // self.block_size * self.block_size

    def num_loadable(self, seq: Sequence, num_cached: int) -> int:
        """Tokens behind the num_cached that another tier holds; it is their transfer that admission begins."""
        return 0

    def can_admit(self, seq: Sequence, num_cached: int, is_alone: bool) -> bool:
        """Whether a waiting sequence could get room for all its known tokens now."""
        room = self.num_free if is_alone else self.num_free - self.num_watermark_blocks
        return self.blocks_for(seq._known) <= room

    def admit(self, seq: Sequence, num_cached: int) -> None:
        """A sequence that can be admitted gets the KV of its num_cached tokens that are here already."""
        self.take(self.blocks_for(num_cached))

    def tier_of(self, seq: Sequence) -> str:
        """Where the KV lies that `num_loadable` found for a sequence: "host" or "disk"."""
        raise NotImplementedError

    def loaded(self, seq: Sequence) -> None:
        """The transfer of that KV is done."""

    def blocks_to_grow(self, seq: Sequence, num_held: int, num_tokens: int) -> int:
        """Free blocks that a sequence needs so that from num_held tokens it holds num_tokens."""
        return self.blocks_for(num_tokens) - self.blocks_for(num_held)

    def grow(self, seq: Sequence, num_held: int, num_tokens: int) -> None:
        """A sequence gets the room for that; the caller has checked num_free."""
        self.take(self.blocks_to_grow(seq, num_held, num_tokens))

    def growth(self, seq: Sequence) -> Growth | None:
        """How the KV of a sequence whose prefill is done grows on; None: it finds no room to do so.

        Asked when it begins to decode, and at every limit that the last answer named. May take blocks, or give
        up some and note that in seq._dropped.
        """
        return PAGED

    def take(self, num_blocks: int) -> None:
        """Hand out blocks; the caller has checked num_free."""
        assert num_blocks <= self.num_free
        self.num_free -= num_blocks

    def release(self, seq: Sequence, num_tokens: int, num_planned: int = 0) -> None:
        """A sequence gives up the room that it holds for num_tokens tokens, and the ids it drew.

        The last num_planned of them were to be computed by the step that is being made, and will not be.
        """
        self.num_free += self.blocks_held(seq, num_tokens)
        assert self.num_free <= self.num_blocks
        self._give_back_ids(seq)

    def blocks_held(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks that a running sequence owns when it holds num_tokens tokens."""
        return self.blocks_for(num_tokens)

    def block_ids(self, seq: Sequence, num_tokens: int) -> list[int]:
        """Physical ids of the blocks that hold the first num_tokens tokens of a sequence that owns them."""
        while len(seq._block_ids) < self.blocks_for(num_tokens):
            seq._block_ids.append(self._free_ids.pop())
        return seq._block_ids

    def check_integrity(self, held: Iterable[tuple[Sequence, int]]) -> None:
        """Assert that the running sequences and the tokens they hold account for every block."""
        owned = sum(self.blocks_held(seq, num_tokens) for seq, num_tokens in held)
        assert owned + self.num_free == self.num_blocks, "a block is leaked or owned twice"

    def _give_back_ids(self, seq: Sequence) -> None:
        self._free_ids.extend(reversed(seq._block_ids))
        seq._block_ids.clear()
