"""The pool of a KV cache: it counts blocks.

Decisions depend on counts only; physical ids are drawn when asked for. `BlockPool` itself is the paged cache;
others override what their idea changes.
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
        hand_over               it goes on as branches: all behind its prompt's full blocks is theirs
        take_apart, give_back   its branches' blocks
        release                 it holds nothing
        sharers                 before the release of planned tokens: who has found them and has to go, too
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
        self.shares_branches = True
        self.num_apart = 0
        """Blocks that the branches of sequences own: `take_apart`, `hand_over`, `give_back`."""
        self.now = float("-inf")
        """The engine's time, set before every plan and at every commit."""
        self.expires_s = float("inf")
        """When `expire` has something to do."""
        self.stores: list[tuple[str, str, int]] = []
        """Copies that the pool wants made: from tier, to tier, tokens."""
        self.num_evicted = 0
        """Blocks whose content was given up for another; a pool without contents has none to give up."""
        self._free_ids: list[int] = []  # drawn once and free again: a stack, the last freed is the next used
        self._num_ids_made = (
            0  # ids above were never drawn: no list of them, pools of 1e8 blocks are no rarity
        )

    @property
    def num_used(self) -> int:
        """Blocks owned by sequences."""
        return self.num_blocks - self.num_free

    @property
    def max_tokens_per_seq(self) -> int:
        """Known tokens with which a sequence alone in the pool can still be admitted."""
        return self.num_blocks * self.block_size

    @property
    def finds_kv(self) -> bool:
        """Whether one who waits may find KV of its tokens here."""
        own = type(self)
        looks = own.num_cached is not BlockPool.num_cached or own.num_loadable is not BlockPool.num_loadable
        return looks or self.presume_cached

    @property
    def num_blank(self) -> int:
        """Free blocks that hold no contents: taking those evicts nothing."""
        return self.num_free

    def peek(self, request: Request) -> int:
        """Tokens that `num_cached` would find of a prompt; who asks, from outside, leaves no trace."""
        if not self.presume_cached:
            return 0
        return (request.prompt.num_tokens - 1) // self.block_size * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens tokens."""
        return -(-num_tokens // self.block_size)

    def pinned_token_s_until(self, end_s: float) -> float:
        """Tokens of pinned prefixes times the seconds for which they were kept, up to end_s."""
        return 0.0

    def expire(self) -> None:
        """Give up what was to be kept until now."""

    def num_cached(self, seq: Sequence) -> int:
        """Tokens of a waiting sequence whose KV is here already: whole blocks, never all that are known."""
        if not self.presume_cached:
            return 0
        return (seq.num_prompt_tokens - 1) // self.block_size * self.block_size

    def num_loadable(self, seq: Sequence, num_cached: int) -> int:
        """Tokens behind the num_cached that another tier holds.

        It is their transfer that admission begins.
        """
        return 0

    def can_admit(self, seq: Sequence, num_cached: int, is_alone: bool) -> bool:
        """Whether a waiting sequence could get room for all its known tokens now."""
        room = self.num_free if is_alone else self.num_free - self.num_watermark_blocks
        return self.blocks_to_admit(seq) <= room

    def blocks_to_admit(self, seq: Sequence) -> int:
        """Blocks that a waiting sequence would hold at once or soon, if nothing of it were cached.

        Those of its branches are among them, if it had any before it was preempted, and those that its
        adapter takes.
        """
        return -(-seq.stored_known // self.block_size) + seq.num_apart + seq.num_beside

    def admit(self, seq: Sequence, num_cached: int) -> None:
        """A sequence that can be admitted gets the KV of its num_cached tokens that are here already."""
        if num_cached:
            self.take(self.blocks_for(num_cached))

    def loads(self, seq: Sequence) -> list[tuple[str, int]]:
        """Where the KV lies that `num_loadable` has just found: tokens by tier, host or disk."""
        return []

    def found_below(self, seq: Sequence) -> list[tuple[str, Content]]:
        """The same block by block, to be asked first: the tier, and what is wanted from there."""
        return []

    def name_blocks(self) -> None:
        """From the beginning, keep the names for `named_stores`."""

    def named_stores(self, read: Set[tuple[str, Content]]) -> tuple[list[Transfer], list[Transfer]]:
        """What `stores` says, with the blocks' names, for an engine that names them; and what is given up.

        read: what the loads since the last call read, by tier. Returns what is to be done before these loads,
        and after them.
        """
        return [], []

    def loaded(self, seq: Sequence) -> None:
        """The transfers of that KV are done."""

    @property
    def num_quiet(self) -> int:
        """Free blocks that can be taken without a copy to another tier."""
        return self.num_free

    def blocks_to_grow(self, seq: Sequence, num_held: int, num_tokens: int) -> int:
        """Free blocks that a sequence needs so that from num_held tokens it holds num_tokens."""
        return -(-num_tokens // self.block_size) + (-num_held // self.block_size)

    def grow(self, seq: Sequence, num_held: int, num_tokens: int) -> None:
        """A sequence gets the room for that; the caller has checked num_free."""
        num_blocks = self.blocks_to_grow(seq, num_held, num_tokens)
        if num_blocks:
            self.take(num_blocks)

    @property
    def chunks_stand_alone(self) -> bool:
        """Whether every iteration with prompt chunks is planned anew: `computed` may free blocks."""
        return False

    def computed(self, seq: Sequence, num_tokens: int) -> None:
        """A step has computed a chunk of a sequence, which now has KV for num_tokens tokens."""

    def growth(self, seq: Sequence) -> Growth | None:
        """How the KV of a sequence whose prefill is done grows on; None: it finds no room to do so.

        Asked when it begins to decode, and at every limit that the last answer named. May take blocks, or
        give up some and note that in seq.num_dropped.
        """
        return PAGED

    def take(self, num_blocks: int) -> None:
        """Hand out blocks; the caller has checked num_free."""
        assert num_blocks <= self.num_free
        self.num_free -= num_blocks

    def take_apart(self, num_blocks: int) -> None:
        """Hand out blocks to branches; the caller has checked num_free."""
        self.take(num_blocks)
        self.num_apart += num_blocks

    def hand_over(self, seq: Sequence, num_tokens: int, num_kept_tokens: int) -> list[int]:
        """Of a sequence's blocks for num_tokens tokens, its branches get those behind their prompt.

        num_kept_tokens, a whole number of blocks, stay the sequence's. Returns their ids, as far as drawn.
        """
        num_kept = num_kept_tokens // self.block_size
        self.num_apart += self.blocks_for(num_tokens) - num_kept
        return self._ids_behind(seq, num_kept)

    def give_back(self, num_blocks: int, ids: Iterable[int]) -> None:
        """Branches give up blocks, and the ids that were drawn for them."""
        self.num_free += num_blocks
        self.num_apart -= num_blocks
        self._free_ids.extend(ids)

    def draw(self, num_ids: int) -> list[int]:
        """Physical ids: first those that are free again, then those that were never drawn, in order."""
        num_again = min(num_ids, len(self._free_ids))
        ids = [self._free_ids.pop() for _ in range(num_again)]
        num_made = self._num_ids_made
        self._num_ids_made += num_ids - num_again
        assert self._num_ids_made <= self.num_blocks, "more ids are drawn than there are blocks"
        ids.extend(range(num_made + 1, self._num_ids_made + 1))
        return ids

    def release(self, seq: Sequence, num_tokens: int, num_planned: int = 0) -> None:
        """A sequence gives up the room that it holds for num_tokens tokens, and the ids it drew.

        The last num_planned of them were to be computed by the step that is being made, and will not be.
        """
        self.num_free += self.blocks_held(seq, num_tokens)
        assert self.num_free <= self.num_blocks
        if seq.block_ids:
            self._give_back_ids(seq)

    def sharers(self, seq: Sequence) -> Iterable[int]:
        """Request ids of those that hold blocks which a sequence has not computed yet.

        Where these are offered beforehand, the step that is being made has admitted them.
        """
        return ()

    def blocks_held(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks that a running sequence owns when it holds num_tokens tokens."""
        return -(-num_tokens // self.block_size)

    def block_ids(self, seq: Sequence, num_tokens: int) -> list[int]:
        """Physical ids of the blocks that hold the first num_tokens tokens of a sequence that owns them."""
        num_missing = self.blocks_for(num_tokens) - len(seq.block_ids)
        if num_missing > 0:
            seq.block_ids += self.draw(num_missing)
        return seq.block_ids

    def check_integrity(self, held: Iterable[tuple[Sequence, int]]) -> None:
        """Assert that the running sequences and the tokens they hold account for every block."""
        owned = sum(self.blocks_held(seq, num_tokens) for seq, num_tokens in held)
        assert owned + self.num_apart + self.num_free == self.num_blocks, "a block is leaked or owned twice"

    def _ids_behind(self, seq: Sequence, num_blocks: int) -> list[int]:
        """Take from a sequence the ids of all but its first num_blocks blocks."""
        ids = seq.block_ids[num_blocks:]
        del seq.block_ids[num_blocks:]
        return ids

    def _give_back_ids(self, seq: Sequence) -> None:
        self._free_ids.extend(reversed(seq.block_ids))
        seq.block_ids.clear()
