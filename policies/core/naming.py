"""Creates transfers with block ids, for an engine that copies bytes; `Transfer` defines their contents."""

from __future__ import annotations

from policies.caching.pool import BlockPool
from policies.core.branch_set import BranchSet
from policies.core.plan import Content, Transfer
from policies.core.sequence import Sequence


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
