"""KV transfers between tiers, and the host memory of swapped-out sequences.

A sequence preempted by swapping leaves its computed KV in host memory. A sequence that is admitted and finds
KV there, in a lower tier of the cache, or in another engine gets a slot and blocks, and waits for its loads.
Nothing is copied here: `take` returns what the executor has to copy before the next step.
"""

from __future__ import annotations

from policies.caching.pool import BlockPool
from policies.core.branch_set import BranchSet
from policies.core.naming import Naming
from policies.core.plan import Transfer
from policies.core.sequence import Sequence


class Transfers:
    """The transfers that plans have asked for since the last `take`.

    num_free_swap_blocks: room in host memory for preempted KV. names_blocks: as in EngineCore.
    """

    def __init__(
        self, pool: BlockPool, branched: BranchSet, num_free_swap_blocks: int, names_blocks: bool
    ) -> None:
        self.num_free_swap_blocks = num_free_swap_blocks
        self._pool = pool
        self._branched = branched
        self._wanted: list[Transfer] = []
        self._naming = Naming(pool, branched) if names_blocks else None

    def take(self) -> list[Transfer]:
        """Returns and forgets all transfers, in order."""
        if self._naming is not None:
            return self._naming.take()
        if not self._wanted and not self._pool.stores:
            return []
        wanted, self._wanted = self._wanted, []
        if self._pool.stores:
            wanted[:0] = [Transfer(None, *store) for store in self._pool.stores]
            self._pool.stores = []
        return wanted

    def num_cached(self, seq: Sequence) -> int:
        """Tokens of a waiting sequence whose KV is on the GPU; 0 if it was swapped out to host memory.

        The KV of a swapped-out sequence lies in one place as a whole.
        """
        return 0 if seq.num_swapped and seq.swap_tier == "host" else self._pool.num_cached(seq)

    def num_loadable(self, seq: Sequence, num_cached: int) -> int:
        """Number of tokens behind the cached ones that a transfer would bring."""
        if seq.num_swapped:
            return max(seq.num_swapped - num_cached, 0)
        return self._pool.num_loadable(seq, num_cached)

    def load(self, seq: Sequence, num_cached: int) -> None:
        """Asks for the loads of a sequence that has its blocks: all its found KV behind num_cached tokens."""
        if self._naming is not None:
            seq.num_transfers = self._naming.load(seq, num_cached)
            return
        loads = [(seq.swap_tier, seq.num_loading)] if seq.num_swapped else self._pool.loads(seq)
        assert sum(num_tokens for _, num_tokens in loads) == seq.num_loading
        self._wanted += [Transfer(seq, source, "gpu", num_tokens) for source, num_tokens in loads]
        seq.num_transfers = len(loads)

    def is_loaded(self, seq: Sequence) -> bool:
        """Counts a finished transfer of a sequence. Returns whether it was the last one."""
        seq.num_transfers -= 1
        if seq.num_transfers:
            return False
        if seq.num_loading:
            seq.num_loading = 0
            self._pool.loaded(seq)
            self.free_swapped(seq)
        return True

    def drop_loads(self, seq: Sequence) -> None:
        """Drops the loads of a sequence that the same step admitted and preempted.

        None of them was taken yet.
        """
        seq.num_loading = 0
        self._wanted = [transfer for transfer in self._wanted if transfer.seq is not seq]
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
            self._wanted.append(Transfer(None, "gpu", "host", seq.stored_computed))
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
        """Ids of the blocks with the computed KV of a sequence without branches.

        Empty unless blocks are named.
        """
        return () if self._naming is None else self._naming.blocks(seq, seq.num_computed)

    def _num_swap_blocks(self, seq: Sequence, num_tokens: int, is_branched: bool) -> int:
        """Blocks that num_tokens computed tokens of a sequence take; branches leave several partly filled."""
        return self._branched.num_stored_blocks(seq) if is_branched else self._pool.blocks_for(num_tokens)
