"""The interface of KV caches: settings that create a block pool, and the pool.

The module is long because it documents the contract of each method. The pool counts free and used blocks and
assigns physical block ids. Decisions depend on counts only; physical ids are assigned on request. `BlockPool`
itself is the pool of the paged cache; subclasses override methods.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

from fieldlimits import Checked, PositiveInt, Unit
from policies.caching.block_tables import KvGroup
from policies.caching.content import ContentListener, FutureUses
from policies.caching.runs import PinnedTime
from policies.core.plan import Content, Transfer
from policies.core.request import Request
from policies.core.sequence import PAGED, Growth, Sequence
from policies.user_code import returned


class BlockPool:
    """Counts free blocks, and assigns physical ids to blocks on demand.

    Physical ids are assigned by `block_ids`: a GPU engine calls it at every step, the simulator never. Ids
    are 1 to num_blocks; block 0 is the null block.

        num_blocks = num_free + blocks owned by sequences;  ids assigned to a sequence <= blocks that it owns

    The methods are called for a sequence in this order:
        num_cached, num_loadable, can_admit
                                cache lookup, and whether there is room for all known tokens
        admit                   the sequence gets its cached blocks
        slide                   blocks outside of its windows are free
        grow                    it gets the blocks of a prompt chunk
        growth                  after its prefill, and at every limit: the further growth of its KV
        take                    blocks for decodes, of any sequences
        move_to_branches        it continues as branches, which own all blocks after its prompt's full blocks
        take_extra, free_extra  blocks of its branches or its adapter
        sharers                 before a release of planned tokens: sequences with a hit on these tokens
        release                 all its blocks are free
    """

    can_fork: ClassVar[bool] = True
    """Whether sequences may share the blocks of their common tokens."""
    slides: ClassVar[bool] = False
    """Whether `slide` may free blocks of a sequence while it runs."""
    copies: ClassVar[bool] = False
    """Whether taking a free block may need a copy to another tier, or a block in several tables."""
    num_tables: int = 1
    """Number of block tables of a sequence, which is its number of blocks per block_size tokens."""
    num_first_tokens: int = 0
    """Tokens with KV after the first step of the sequence passed to `can_admit`."""
    unfilled: array[int] | None = None
    """Token slots that were reserved and never filled; None for a pool that does not reserve slots.

    Each row has three numbers: the first iteration in which the slots were reserved, the iteration before
    which they were freed, and the number of slots.
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
        self.drops_last_block = False
        """Whether a lookup drops the last block that it finds, because drafting needs its hidden states."""
        self.lookahead = 0
        """Number of tokens after a block that belong to its content; see `look_ahead`."""
        self.num_reprefillable_tokens = 0
        """Number of the last computed tokens of a sequence that no lookup finds.

        A proposer with several layers has not seen the tokens after them, so its KV for them is not final.
        """
        self.shares_branches = True
        self.awaits_answer = False
        """Whether generated tokens affect a lookup or a prompt of this step, so that it cannot be repeated.
        """
        self.num_extra_blocks = 0
        """Blocks of branches, adapters and states: `take_extra`, `move_to_branches`, `free_extra`."""
        self.now = float("-inf")
        """Time of the engine in seconds, set before every plan and at every commit."""
        self.expires_s = float("inf")
        """Time, in seconds, at which `expire` next has an effect."""
        self.stores: list[tuple[str, str, int]] = []
        """Copies that the pool requests: (source tier, target tier, tokens)."""
        self.num_state_blocks = 0
        """Blocks that a sequence owns for its linear-attention states, from its admission on."""
        self.num_evicted = 0
        """Number of evicted blocks with content; 0 for a pool without contents."""
        self._free_ids: list[int] = []  # ids that were assigned and are free again, as a stack
        self._num_ids_made = 0  # larger ids were never assigned; a list of them would be large for 1e8 blocks

    @property
    def num_used(self) -> int:
        """Number of blocks owned by sequences."""
        return self.num_blocks - self.num_free

    @property
    def unfilled_since(self) -> int:
        """Earliest first iteration of rows that may still be added to `unfilled`."""
        return self.num_iterations

    @property
    def max_tokens_per_seq(self) -> int:
        """Maximum number of known tokens of a sequence that is admitted to the empty pool."""
        return self.num_blocks * self.block_size

    @property
    def finds_kv(self) -> bool:
        """True if the pool may have cached KV for a waiting sequence."""
        own = type(self)
        looks = own.num_cached is not BlockPool.num_cached or own.num_loadable is not BlockPool.num_loadable
        return looks or self.presume_cached

    @property
    def num_free_without_content(self) -> int:
        """Number of free blocks without content, which are taken without an eviction."""
        return self.num_free

    def peek(self, request: Request) -> int:
        """Returns the number of tokens of a prompt that `num_cached` would find; changes nothing."""
        if not self.presume_cached:
            return 0
        return (request.prompt.num_tokens - 1) // self.block_size * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Computes the number of blocks for num_tokens tokens."""
        return -(-num_tokens // self.block_size)

    @property
    def pinned_time(self) -> PinnedTime:
        """Durations for which pinned prefixes were kept."""
        return PinnedTime()

    def watch(self, num_readable: Callable[[Sequence], int]) -> None:
        """Sets the function that counts the known and computed tokens of a running sequence."""

    def look_ahead(self, num_tokens: int) -> bool:
        """Adds this many tokens after a block to its content, because the draft's KV depends on them.

        Returns whether the pool supports it; the pool must be empty.
        """
        return False

    @property
    def needs_offers(self) -> bool:
        """True if decoded tokens must be offered once they are known: their order matters to lookups."""
        return False

    def offer_known(self, seq: Sequence, num_tokens: int) -> None:
        """Offers the first num_tokens tokens of a decoding sequence; see `needs_offers`."""

    def report_to(self, listener: ContentListener) -> bool:
        """Reports changes of the contents from now on; returns False for a pool without contents.

        The pool must be empty.
        """
        return False

    def report_delayed(self, running: Iterable[Sequence]) -> None:
        """Sends delayed reports after a plan; running: all sequences in a slot."""

    def offer_generated(self, seq: Sequence) -> None:
        """Offers the known tokens of a running sequence and of others with an equal answer; see `watch`."""

    def evict_ahead(self, num_blocks: int) -> None:
        """Evicts contents until num_blocks empty blocks are free, if the pool evicts ahead."""

    def settle(self) -> None:
        """Performs the delayed evictions for a step's prompts, at the step's end or before transfers."""

    def touch(self, seq: Sequence) -> None:
        """Marks the contents that a waiting sequence would find as used, if that may delay their eviction."""

    def num_matched(self, seq: Sequence) -> int:
        """Counts the known tokens of a waiting sequence with content here, possibly all of them."""
        return self.num_cached(seq)

    def clear_cache(self) -> None:
        """Evicts the contents of all free blocks; those of running sequences and pinned prefixes stay."""

    def expire(self) -> None:
        """Releases the pinned prefixes that expire at `now` or before."""

    def num_cached(self, seq: Sequence) -> int:
        """Looks up the cached tokens of a waiting sequence: whole blocks, never all known tokens."""
        if not self.presume_cached:
            return 0
        return (seq.num_prompt_tokens - 1) // self.block_size * self.block_size

    def num_loadable(self, seq: Sequence, num_cached: int) -> int:
        """Looks up the tokens after the num_cached ones in other tiers; admission starts their transfer."""
        return 0

    def can_admit(self, seq: Sequence, num_cached: int, is_alone: bool) -> bool:
        """Returns whether there is room for all known tokens of a waiting sequence now."""
        room = self.num_free if is_alone else self.num_free - self.num_watermark_blocks
        return self.blocks_to_admit(seq) <= room

    def num_free_found(self, seq: Sequence, num_cached: int) -> int:
        """Counts the free blocks that hold a waiting sequence's num_cached cached tokens."""
        return self.blocks_for(num_cached)

    def blocks_to_admit(self, seq: Sequence) -> int:
        """Counts the blocks that a waiting sequence needs if none of its tokens is cached.

        Includes the blocks of its branches (if it had any before a preemption), its adapter and its states.
        Excludes blocks that it may get after its admission (`StepBuilder.reserve_first_chunks`).
        """
        num_more = seq.num_extra_blocks + seq.num_adapter_blocks - seq.num_unreserved_blocks
        return -(-seq.stored_known // self.block_size) + num_more + self.num_state_blocks

    def admit(self, seq: Sequence, num_cached: int) -> None:
        """Assigns the blocks of its num_cached cached tokens to a sequence that can be admitted."""
        if num_cached:
            self.take(self.blocks_for(num_cached))

    def loads(self, seq: Sequence) -> list[tuple[str, int]]:
        """Returns (source tier, tokens) for the KV in other tiers that `num_loadable` has just found."""
        return []

    def found_below(self, seq: Sequence) -> list[tuple[str, Content]]:
        """Returns tier and content of each block of that KV; must be called before `loads`."""
        return []

    def name_blocks(self) -> None:
        """Starts to record block ids for `named_stores`; must be called before the first request."""

    def named_stores(self, read: Set[tuple[str, Content]]) -> tuple[list[Transfer], list[Transfer]]:
        """Returns the transfers of `stores` with block ids, and dropped contents, for an engine that copies.

        read: (tier, content) read by the loads since the last call. The result has the transfers before and
        after these loads.
        """
        return [], []

    def loaded(self, seq: Sequence) -> None:
        """Is called when the loads of a sequence are done."""

    @property
    def num_free_without_copy(self) -> int:
        """Number of free blocks that can be taken without a copy to another tier."""
        return self.num_free

    def blocks_to_grow(self, seq: Sequence, num_held: int, num_tokens: int) -> int:
        """Computes the blocks that a sequence needs to grow from num_held to num_tokens tokens."""
        return -(-num_tokens // self.block_size) + (-num_held // self.block_size)

    def grow(self, seq: Sequence, num_held: int, num_tokens: int) -> None:
        """Takes the blocks of `blocks_to_grow` for a sequence; the caller must have checked num_free."""
        num_blocks = self.blocks_to_grow(seq, num_held, num_tokens)
        if num_blocks:
            self.take(num_blocks)

    @property
    def replans_chunks(self) -> bool:
        """True if iterations with prompt chunks are not repeated, because `computed` may free blocks."""
        return False

    def plan_ahead(self) -> None:
        """Is called once by an engine that plans a step before the previous step has ended."""

    def slide(self, seq: Sequence, num_computed: int) -> None:
        """Frees the blocks that no further token of a sequence with num_computed tokens attends to.

        Is called before the sequence gets tokens and before its blocks are counted; see `slides`.
        """

    def computed(self, seq: Sequence, num_tokens: int) -> None:
        """Is called after a chunk of a sequence, which now has KV for num_tokens tokens."""

    def growth(self, seq: Sequence) -> Growth | None:
        """Returns the growth of a sequence's KV while it decodes; None if there is no room for it.

        Is called when the sequence begins to decode and at the limit of the previous growth. May take blocks,
        or drop tokens and record this in seq.num_dropped.
        """
        return PAGED

    def take(self, num_blocks: int) -> None:
        """Takes blocks; the caller must have checked num_free."""
        assert num_blocks <= self.num_free
        self.num_free -= num_blocks

    def give_back(self, seq: Sequence, num_kept: int, num_blocks: int) -> None:
        """Frees the num_blocks unfilled blocks of a decoding sequence after its first num_kept ones."""
        self.num_free += num_blocks
        self._free_ids.extend(reversed(self._ids_behind(seq, num_kept)))

    def take_extra(self, num_blocks: int) -> None:
        """Takes blocks for branches, adapters or states; the caller must have checked num_free."""
        self.take(num_blocks)
        self.num_extra_blocks += num_blocks

    def move_to_branches(self, seq: Sequence, num_tokens: int, num_kept_tokens: int) -> list[int]:
        """Moves blocks of a sequence with num_tokens tokens to its branches; returns their assigned ids.

        num_kept_tokens: the first tokens, in whole blocks, that remain with the sequence.
        """
        num_kept = num_kept_tokens // self.block_size
        self.num_extra_blocks += self.blocks_for(num_tokens) - num_kept
        return self._ids_behind(seq, num_kept)

    def free_extra(self, num_blocks: int, ids: Iterable[int]) -> None:
        """Frees blocks of branches, adapters or states, and the ids that were assigned to them."""
        self.num_free += num_blocks
        self.num_extra_blocks -= num_blocks
        self._free_ids.extend(ids)

    def draw(self, num_ids: int) -> list[int]:
        """Assigns physical ids: first freed ids, then new ones in order."""
        free_ids = self._free_ids
        num_again = min(num_ids, len(free_ids))
        ids = [free_ids.pop() for _ in range(num_again)]
        if num_again == num_ids:  # nearly always: one id per call
            return ids
        num_made = self._num_ids_made
        self._num_ids_made += num_ids - num_again
        assert self._num_ids_made <= self.num_blocks, "more ids were assigned than there are blocks"
        ids.extend(range(num_made + 1, self._num_ids_made + 1))
        return ids

    def release(self, seq: Sequence, num_tokens: int, num_planned: int = 0) -> None:
        """Frees the blocks that a sequence holds for num_tokens tokens, and their physical ids.

        num_planned: the last of these tokens, which the current step has planned and will not compute.
        """
        self.num_free += self.blocks_held(seq, num_tokens)
        assert self.num_free <= self.num_blocks
        if seq.block_ids:
            self._release_ids(seq)

    def sharers(self, seq: Sequence) -> Iterable[int]:
        """Returns the request ids of sequences with a hit on blocks that this sequence has not computed yet.

        There are such sequences only in a pool that offers blocks before they are computed; the current step
        admitted them.
        """
        return ()

    def owners_found(self, seq: Sequence) -> Iterable[int]:
        """Returns the owners of the last block that `num_cached` has just found for a waiting sequence.

        Owners are request ids, or negative numbers for pins. Like `sharers`, only a pool that offers blocks
        before they are computed returns any.
        """
        return ()

    def blocks_held(self, seq: Sequence, num_tokens: int) -> int:
        """Returns the number of blocks that a running sequence with num_tokens tokens owns."""
        return -(-num_tokens // self.block_size)

    def block_ids(self, seq: Sequence, num_tokens: int) -> list[int]:
        """Returns the physical ids of the blocks of the first num_tokens tokens of a running sequence."""
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
        """Removes and returns the ids of the blocks of a sequence after the first num_blocks ones."""
        ids = seq.block_ids[num_blocks:]
        del seq.block_ids[num_blocks:]
        return ids

    def _release_ids(self, seq: Sequence) -> None:
        self._free_ids.extend(reversed(seq.block_ids))
        seq.block_ids.clear()


class KvMemory(NamedTuple):
    """The memory that a pool manages."""

    num_blocks: int  # blocks of `block_size` tokens on the GPU
    bytes_per_token: float = 0.0  # KV bytes over all layers and heads
    num_devices: int = 1  # GPUs of the replica
    max_model_len: int = 2**31  # prompt and output tokens of one sequence
    future: FutureUses | None = None  # future requests, for offline bounds; no engine knows them
    groups: tuple[KvGroup, ...] = ()  # KV groups of the model, for a cache that has them
    max_in_flight_tokens: int = 2**31  # maximum number of tokens in unfinished steps
    state_blocks: int = 0  # blocks of a sequence for its linear-attention states


class WeightReads(NamedTuple):
    """Attention weights that the selection of kept tokens reads; fused (flash) kernels do not return them."""

    decode_share: float = 0.0
    """Share of the heads whose weights are read in every decode step."""
    prompt_rows: int | None = None
    """Number of last rows of a prompt whose weights are read once, at its end; None: the weights of every row
    are read.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Caching(Checked):
    """Settings of a cache. A policy overrides `pool` and further methods as needed."""

    changes_outputs: ClassVar[bool] = False
    """Whether the model's outputs change, because attention does not see dropped KV."""
    has_groups: ClassVar[bool] = False
    """Whether a block holds the KV of one group of layers instead of all; see
    `policies.caching.block_tables`.
    """
    holds_states: ClassVar[bool] = False
    """Whether a sequence may take blocks for its linear-attention states (`KvMemory.state_blocks`)."""
    finds_prefixes: ClassVar[bool] = False
    """Whether later sequences find the KV of equal prefixes."""

    block_size: Annotated[PositiveInt, Unit("token")] = 16
    """Number of tokens whose KV a block holds."""

    @property
    def needs_predictor(self) -> bool:
        """True if the cache reads `Sequence.num_predicted_tokens`."""
        return False

    @property
    def needs_future(self) -> bool:
        """True if the cache needs the future requests (`KvMemory.future`), which are unknown to engines."""
        return False

    @property
    def tiers_gib(self) -> tuple[float, float]:
        """Host memory and disk space of the cache, in GiB per GPU."""
        return 0.0, 0.0

    @property
    def weight_reads(self) -> WeightReads | None:
        """Attention weights that the cache reads; None: none, so fused kernels compute attention."""
        return None

    @property
    def quality_note(self) -> str:
        """Clause for the notes of a run about outputs that the cache changes."""
        return "their quality is not simulated"

    @abstractmethod
    def pool(self, memory: KvMemory) -> BlockPool:
        """Creates an empty pool. Raises ValueError if the settings do not fit the memory."""
        raise NotImplementedError


def pool_of(caching: Caching, memory: KvMemory) -> BlockPool:
    """Returns an empty pool of a cache. Raises WrongDecisionError if the cache creates anything else."""
    pool: object = caching.pool(memory)
    if not isinstance(pool, BlockPool):
        raise returned(caching, "pool", pool, "must return a policies.caching.pool.BlockPool")
    pool.num_state_blocks = memory.state_blocks
    return pool
