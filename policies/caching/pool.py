"""The pool of a KV cache, which counts blocks.

Decisions depend on counts only; physical ids are assigned when asked for. `BlockPool` itself is the paged
cache; subclasses override what differs.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Set
from typing import ClassVar

from policies.core.growth import PAGED, Growth
from policies.core.plan import Content, Transfer
from policies.core.request import Request
from policies.core.sequence import Sequence


class BlockPool:
    """Counts free blocks, and assigns physical ids to blocks on demand.

    Physical ids are assigned when asked for (`block_ids`): a GPU engine asks at every step, the simulator
    never does. Ids run from 1 to num_blocks; block 0 is the null block.

        num_blocks = num_free + blocks owned by sequences;  ids assigned to a sequence <= blocks it owns

    The calls for the KV of a sequence are in this order:
        num_cached, num_loadable, can_admit
                                look up the hit, and whether there is room for all known tokens
        admit                   it holds the hit
        grow                    it holds the tokens up to a number, chunk by chunk
        growth                  its prefill is done: how its KV grows; asked again at every limit it names
        take                    decodes need blocks, of whichever sequences
        move_to_branches               it continues as branches, which own all behind its prompt's full blocks
        take_extra, free_extra   blocks of its branches
        release                 it holds nothing
        sharers                 before a release of planned tokens: sequences that found them
    """

    can_fork: ClassVar[bool] = True
    """Whether sequences may share the blocks of their common tokens."""
    unfilled: array[int] | None = None
    """For a pool that reserves ahead: token slots that were never filled; None where none are reserved.

    Rows of three: first iteration in which they were held, iteration before which they were freed, their
    number.
    """

    def __init__(self, num_blocks: int, block_size: int, num_watermark_blocks: int = 0) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks}: must be >= 1")
        self.num_iterations = 0  # committed iterations, set by the engine
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_watermark_blocks = num_watermark_blocks
        self.num_free = num_blocks
        self.presume_cached = False
        self.shares_branches = True
        self.num_extra_blocks = 0
        """Number of blocks that branches or adapters own: `take_extra`, `move_to_branches`, `free_extra`."""
        self.now = float("-inf")
        """Time of the engine in seconds, set before every plan and at every commit."""
        self.expires_s = float("inf")
        """Time of the next call of `expire` that has an effect, in seconds."""
        self.stores: list[tuple[str, str, int]] = []
        """Copies that the pool asks for: (source tier, target tier, tokens)."""
        self.num_evicted = 0
        """Number of blocks whose content was evicted for another; 0 for a pool without contents."""
        self._free_ids: list[int] = []  # ids that were assigned and are free again: a stack
        self._num_ids_made = (
            0  # ids above were never drawn: no list of them, pools of 1e8 blocks are no rarity
        )

    @property
    def num_used(self) -> int:
        """Number of blocks owned by sequences."""
        return self.num_blocks - self.num_free

    @property
    def max_tokens_per_seq(self) -> int:
        """Number of known tokens with which a sequence alone in the pool can still be admitted."""
        return self.num_blocks * self.block_size

    @property
    def finds_kv(self) -> bool:
        """Whether a waiting sequence may find KV of its tokens here."""
        own = type(self)
        looks = own.num_cached is not BlockPool.num_cached or own.num_loadable is not BlockPool.num_loadable
        return looks or self.presume_cached

    @property
    def num_free_without_content(self) -> int:
        """Number of free blocks without contents: taking them evicts nothing."""
        return self.num_free

    def peek(self, request: Request) -> int:
        """Number of tokens that `num_cached` would find of a prompt; the call changes nothing."""
        if not self.presume_cached:
            return 0
        return (request.prompt.num_tokens - 1) // self.block_size * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold num_tokens tokens."""
        return -(-num_tokens // self.block_size)

    def pinned_token_s_until(self, end_s: float) -> float:
        """Sum over pinned prefixes of tokens times the seconds for which they were kept, up to end_s."""
        return 0.0

    def expire(self) -> None:
        """Gives up what was to be kept until now."""

    def num_cached(self, seq: Sequence) -> int:
        """Number of cached tokens of a waiting sequence: whole blocks, never all known tokens."""
        if not self.presume_cached:
            return 0
        return (seq.num_prompt_tokens - 1) // self.block_size * self.block_size

    def num_loadable(self, seq: Sequence, num_cached: int) -> int:
        """Number of tokens behind the num_cached that another tier holds; admission starts their transfer."""
        return 0

    def can_admit(self, seq: Sequence, num_cached: int, is_alone: bool) -> bool:
        """Whether a waiting sequence could get room for all its known tokens now."""
        room = self.num_free if is_alone else self.num_free - self.num_watermark_blocks
        return self.blocks_to_admit(seq) <= room

    def blocks_to_admit(self, seq: Sequence) -> int:
        """Number of blocks that a waiting sequence would hold at once or soon, if none of it were cached.

        The blocks of its branches are included, if it had any before it was preempted, and those of its
        adapter.
        """
        return -(-seq.stored_known // self.block_size) + seq.num_extra_blocks + seq.num_adapter_blocks

    def admit(self, seq: Sequence, num_cached: int) -> None:
        """Gives a sequence that can be admitted the KV of its num_cached cached tokens."""
        if num_cached:
            self.take(self.blocks_for(num_cached))

    def loads(self, seq: Sequence) -> list[tuple[str, int]]:
        """Number of tokens per source tier (host or disk) of the KV that `num_loadable` has just found."""
        return []

    def found_below(self, seq: Sequence) -> list[tuple[str, Content]]:
        """Block by block, the tier and the content of that KV; to be called before `loads`."""
        return []

    def name_blocks(self) -> None:
        """Starts recording block names for `named_stores`; to be called at the beginning."""

    def named_stores(self, read: Set[tuple[str, Content]]) -> tuple[list[Transfer], list[Transfer]]:
        """The transfers of `stores` with block names, and dropped contents, for an engine that copies.

        read: what the loads since the last call read, by tier. Returns the transfers before these loads, and
        those after them.
        """
        return [], []

    def loaded(self, seq: Sequence) -> None:
        """Called when the transfers of that KV are done."""

    @property
    def num_free_without_copy(self) -> int:
        """Number of free blocks that can be taken without a copy to another tier."""
        return self.num_free

    def blocks_to_grow(self, seq: Sequence, num_held: int, num_tokens: int) -> int:
        """Number of free blocks that a sequence needs to grow from num_held to num_tokens tokens."""
        return -(-num_tokens // self.block_size) + (-num_held // self.block_size)

    def grow(self, seq: Sequence, num_held: int, num_tokens: int) -> None:
        """Takes these blocks for a sequence; the caller has checked num_free."""
        num_blocks = self.blocks_to_grow(seq, num_held, num_tokens)
        if num_blocks:
            self.take(num_blocks)

    @property
    def replans_chunks(self) -> bool:
        """Whether every iteration with prompt chunks is planned anew, as `computed` may free blocks."""
        return False

    def computed(self, seq: Sequence, num_tokens: int) -> None:
        """Called when a step has computed a chunk of a sequence, which now has KV for num_tokens tokens."""

    def growth(self, seq: Sequence) -> Growth | None:
        """How the KV of a sequence grows after its prefill; None: there is no room to do so.

        Called when it begins to decode, and at every limit that the last answer named. May take blocks, or
        drop some and record that in seq.num_dropped.
        """
        return PAGED

    def take(self, num_blocks: int) -> None:
        """Takes blocks; the caller has checked num_free."""
        assert num_blocks <= self.num_free
        self.num_free -= num_blocks

    def take_extra(self, num_blocks: int) -> None:
        """Takes blocks for branches; the caller has checked num_free."""
        self.take(num_blocks)
        self.num_extra_blocks += num_blocks

    def move_to_branches(self, seq: Sequence, num_tokens: int, num_kept_tokens: int) -> list[int]:
        """Gives the branches of a sequence its blocks behind the prompt, of those for num_tokens tokens.

        num_kept_tokens, a whole number of blocks, stay with the sequence. Returns the ids given, as far as
        assigned.
        """
        num_kept = num_kept_tokens // self.block_size
        self.num_extra_blocks += self.blocks_for(num_tokens) - num_kept
        return self._ids_behind(seq, num_kept)

    def free_extra(self, num_blocks: int, ids: Iterable[int]) -> None:
        """Frees blocks of branches, and the ids that were assigned to them."""
        self.num_free += num_blocks
        self.num_extra_blocks -= num_blocks
        self._free_ids.extend(ids)

    def draw(self, num_ids: int) -> list[int]:
        """Assigns physical ids: first ids that are free again, then new ones, in order."""
        num_again = min(num_ids, len(self._free_ids))
        ids = [self._free_ids.pop() for _ in range(num_again)]
        num_made = self._num_ids_made
        self._num_ids_made += num_ids - num_again
        assert self._num_ids_made <= self.num_blocks, "more ids are drawn than there are blocks"
        ids.extend(range(num_made + 1, self._num_ids_made + 1))
        return ids

    def release(self, seq: Sequence, num_tokens: int, num_planned: int = 0) -> None:
        """Frees the room that a sequence holds for num_tokens tokens, and its physical ids.

        The last num_planned of them were planned in the step that is being made, and will not be computed.
        """
        self.num_free += self.blocks_held(seq, num_tokens)
        assert self.num_free <= self.num_blocks
        if seq.block_ids:
            self._give_back_ids(seq)

    def sharers(self, seq: Sequence) -> Iterable[int]:
        """Request ids of sequences that hold blocks which this sequence has not computed yet.

        If blocks are offered before they are computed, these sequences were admitted by the step being made.
        """
        return ()

    def blocks_held(self, seq: Sequence, num_tokens: int) -> int:
        """Number of blocks that a running sequence owns when it holds num_tokens tokens."""
        return -(-num_tokens // self.block_size)

    def block_ids(self, seq: Sequence, num_tokens: int) -> list[int]:
        """Physical ids of the blocks that hold the first num_tokens tokens of a sequence that owns them."""
        num_missing = self.blocks_for(num_tokens) - len(seq.block_ids)
        if num_missing > 0:
            seq.block_ids += self.draw(num_missing)
        return seq.block_ids

    def check_integrity(self, held: Iterable[tuple[Sequence, int]]) -> None:
        """Asserts that the running sequences and the tokens they hold account for every block."""
        owned = sum(self.blocks_held(seq, num_tokens) for seq, num_tokens in held)
        assert owned + self.num_extra_blocks + self.num_free == self.num_blocks, (
            "a block is leaked or owned twice"
        )

    def _ids_behind(self, seq: Sequence, num_blocks: int) -> list[int]:
        """Removes and returns the ids of all but the first num_blocks blocks of a sequence."""
        ids = seq.block_ids[num_blocks:]
        del seq.block_ids[num_blocks:]
        return ids

    def _give_back_ids(self, seq: Sequence) -> None:
        self._free_ids.extend(reversed(seq.block_ids))
        seq.block_ids.clear()
