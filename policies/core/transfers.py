"""KV transfers between tiers, and the host memory of swapped-out sequences.

A sequence preempted by swapping has its computed KV in host memory. An admitted sequence with KV there, in a
lower tier of the cache, or in another engine gets a slot and blocks and waits for its loads. This module
copies no bytes: `take` returns the transfers that the executor must run before the next step.

For an engine that copies bytes, transfers are created with block ids; `Transfer` defines their contents.
"""

from __future__ import annotations

from typing import Final

from policies.caching.pool import BlockPool
from policies.core.branch_set import BranchSet
from policies.core.plan import Content, Transfer
from policies.core.sequence import Sequence

WHOLE: Final = ("host", "live")
"""Sources from which all KV of a sequence is loaded, regardless of cache hits."""


class Transfers:
    """The transfers that plans have requested since the last `take`.

    num_free_swap_blocks: blocks of host memory for preempted KV. names_blocks: as in EngineCore.
    """

    def __init__(
        self, pool: BlockPool, branched: BranchSet, num_free_swap_blocks: int, names_blocks: bool
    ) -> None:
        self.num_free_swap_blocks = num_free_swap_blocks
        self._pool = pool
        self._branched = branched
        self.wanted: list[Transfer] = []
        """The transfers since the last `take`, without block ids."""
        self._naming = Naming(pool, branched) if names_blocks else None

    def take(self) -> list[Transfer]:
        """Returns and removes all transfers, in order."""
        if self._naming is not None:
            return self._naming.take()
        if not self.wanted and not self._pool.stores:
            return []
        wanted, self.wanted = self.wanted, []
        if self._pool.stores:
            wanted[:0] = [Transfer(None, *store) for store in self._pool.stores]
            self._pool.stores = []
        return wanted

    def num_cached(self, seq: Sequence) -> int:
        """Counts the tokens of a waiting sequence with KV on the GPU.

        0 if it was swapped out, because then all its KV is in host memory, or if another engine decodes it.
        """
        return 0 if seq.num_swapped and seq.swap_tier in WHOLE else self._pool.num_cached(seq)

    def num_loadable(self, seq: Sequence, num_cached: int) -> int:
        """Counts the tokens after the cached ones with KV that a transfer would load."""
        if seq.num_swapped:
            return max(seq.num_swapped - num_cached, 0)
        return self._pool.num_loadable(seq, num_cached)

    def load(self, seq: Sequence, num_cached: int) -> None:
        """Requests the loads of a sequence that has its blocks: all KV found after its num_cached tokens."""
        if self._naming is not None:
            seq.num_transfers = self._naming.load(seq, num_cached)
            return
        loads = [(seq.swap_tier, seq.num_loading)] if seq.num_swapped else self._pool.loads(seq)
        assert sum(num_tokens for _, num_tokens in loads) == seq.num_loading
        self.wanted += [Transfer(seq, source, "gpu", num_tokens) for source, num_tokens in loads]
        seq.num_transfers = len(loads)

    def is_loaded(self, seq: Sequence) -> bool:
        """Records a finished transfer of a sequence; returns whether it was the last one."""
        seq.num_transfers -= 1
        if seq.num_transfers:
            return False
        if seq.num_loading:
            seq.num_loading = 0
            self._pool.loaded(seq)
            self.free_swapped(seq)
        return True

    def drop_loads(self, seq: Sequence) -> None:
        """Drops the loads of a sequence that one step admitted and preempted; none has been taken yet."""
        seq.num_loading = 0
        self.wanted = [transfer for transfer in self.wanted if transfer.seq is not seq]
        if self._naming is not None:
            self._naming.drop_loads(seq)

    def swap_out(self, seq: Sequence, is_branched: bool) -> None:
        """Moves the computed KV of a sequence to host memory, if there is room."""
        num_blocks = self._num_swap_blocks(seq, seq.stored_computed, is_branched)
        if not 0 < num_blocks <= self.num_free_swap_blocks:
            return
        self.num_free_swap_blocks -= num_blocks
        seq.num_swapped = seq.stored_computed
        if self._naming is None:
            self.wanted.append(Transfer(None, "gpu", "host", seq.stored_computed))
        else:
            self._naming.store(seq, is_branched)

    def free_swapped(self, seq: Sequence) -> None:
        """Frees the host memory of a sequence that was swapped out."""
        if seq.num_swapped and seq.swap_tier == "host":
            is_branched = seq.branches is not None and seq.branches.is_swapped
            num_blocks = self._num_swap_blocks(seq, seq.num_swapped, is_branched)
            self.num_free_swap_blocks += num_blocks
            if self._naming is not None:
                self._naming.give_up(seq, num_blocks)
        seq.num_swapped = 0
        seq.swap_tier = "host"

    def blocks(self, seq: Sequence) -> tuple[int, ...]:
        """Returns the ids of the blocks of a sequence without branches; empty without names_blocks."""
        return () if self._naming is None else self._naming.blocks(seq, seq.num_computed)

    def _num_swap_blocks(self, seq: Sequence, num_tokens: int, is_branched: bool) -> int:
        """Counts the blocks of num_tokens computed tokens; branches have several partly filled blocks."""
        return self._branched.num_stored_blocks(seq) if is_branched else self._pool.blocks_for(num_tokens)


class Naming:
    """The transfers, with block ids, that plans have requested since the last `take`."""

    def __init__(self, pool: BlockPool, branched: BranchSet) -> None:
        self._pool = pool
        self._branched = branched
        self._given_up: list[Transfer] = []
        self._stores: list[Transfer] = []
        self._loads: list[Transfer] = []
        pool.name_blocks()

    def blocks(self, seq: Sequence, num_tokens: int) -> tuple[int, ...]:
        """Returns the ids of the blocks of the first num_tokens tokens of a sequence without branches."""
        return tuple(self._pool.block_ids(seq, num_tokens)[: self._pool.blocks_for(num_tokens)])

    def store(self, seq: Sequence, is_branched: bool) -> None:
        """Adds a store of all computed KV of a sequence to host memory; the sequence still has its blocks."""
        stored_ids = self._branched.stored_ids
        blocks = tuple(stored_ids(seq)) if is_branched else self.blocks(seq, seq.stored_computed)
        contents = _contents(seq, len(blocks))
        self._stores.append(Transfer(None, "gpu", "host", seq.num_swapped, blocks, contents))

    def give_up(self, seq: Sequence, num_blocks: int) -> None:
        """Records that a sequence's KV in host memory is no longer needed."""
        contents = _contents(seq, num_blocks)
        self._given_up.append(Transfer(None, "host", "nowhere", seq.num_swapped, (), contents))

    def load(self, seq: Sequence, num_cached: int) -> int:
        """Adds loads of a sequence's KV after num_cached tokens into its new blocks; returns their number."""
        pool = self._pool
        blocks = self.blocks(seq, seq.stored_computed)[num_cached // pool.block_size :]
        if seq.num_swapped:
            blocks += tuple(self._branched.extra_ids(seq))
            first = num_cached // pool.block_size
            found = [(seq.swap_tier, content) for content in _contents(seq, first + len(blocks))[first:]]
            loads = [(seq.swap_tier, seq.num_loading)]
        else:
            found = pool.found_below(seq)
            loads = pool.loads(seq)
        wanted = list(zip(found, blocks, strict=True))
        for source, num_tokens in loads:
            of_tier = [(block, content) for (tier, content), block in wanted if tier == source]
            targets, contents = zip(*of_tier, strict=True)
            self._loads.append(Transfer(seq, source, "gpu", num_tokens, targets, contents))
        return len(loads)

    def drop_loads(self, seq: Sequence) -> None:
        """Drops the loads of a sequence that frees its blocks before the loads were taken."""
        self._loads = [load for load in self._loads if load.seq is not seq]

    def take(self) -> list[Transfer]:
        """Returns and removes all transfers, in the order that `Transfer` defines."""
        loads = self._loads
        read = {(load.source, content) for load in loads for content in load.contents if content[0] >= 0}
        before, after = self._pool.named_stores(read)
        transfers = [*self._given_up, *before, *self._stores, *loads, *after]
        self._given_up, self._stores, self._loads = [], [], []
        return transfers


def _contents(seq: Sequence, num_blocks: int) -> tuple[Content, ...]:
    """Returns the contents of blocks that belong to one sequence alone."""
    return tuple((-1 - seq.request_id, block) for block in range(num_blocks))
