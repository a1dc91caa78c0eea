"""KV on its way between tiers, and the room in host memory of those that were swapped out.

A sequence preempted by swapping leaves what it has computed in host memory. Who is admitted and finds KV
there, in a lower tier of the cache, or in another engine, has slot and blocks, and waits for its loads.
Nothing is copied here: `take` says what is to be copied before the next step.
"""

from __future__ import annotations

from policies.caching.pool import BlockPool
from policies.core.branch_set import BranchSet
from policies.core.naming import Naming
from policies.core.plan import Transfer
from policies.core.sequence import Sequence


class Transfers:
    """What plans have asked for since the last `take`.

    num_free_swap_blocks: room in host memory for preempted KV. names_blocks: as EngineCore.
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
        """All of it, in order."""
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
        """Tokens of one who waits whose KV is here; what was swapped out is all in one place, elsewhere."""
        return 0 if seq.num_swapped and seq.swap_tier == "host" else self._pool.num_cached(seq)

    def num_loadable(self, seq: Sequence, num_cached: int) -> int:
        """Tokens behind those that a transfer would bring."""
        if seq.num_swapped:
            return max(seq.num_swapped - num_cached, 0)
        return self._pool.num_loadable(seq, num_cached)

    def load(self, seq: Sequence, num_cached: int) -> None:
        """A sequence has got its blocks; what is to be in them behind num_cached tokens is loaded."""
        if self._naming is not None:
            seq.num_transfers = self._naming.load(seq, num_cached)
            return
        loads = [(seq.swap_tier, seq.num_loading)] if seq.num_swapped else self._pool.loads(seq)
        assert sum(num_tokens for _, num_tokens in loads) == seq.num_loading
        self._wanted += [Transfer(seq, source, "gpu", num_tokens) for source, num_tokens in loads]
        seq.num_transfers = len(loads)

    def is_loaded(self, seq: Sequence) -> bool:
        """A transfer for which a sequence waits is done; whether that was the last."""
        seq.num_transfers -= 1
        if seq.num_transfers:
            return False
        if seq.num_loading:
            seq.num_loading = 0
            self._pool.loaded(seq)
            self.free_swapped(seq)
        return True

    def drop_loads(self, seq: Sequence) -> None:
        """A sequence has been taken back by the very step that let it load: nothing of that was taken yet."""
        seq.num_loading = 0
        self._wanted = [transfer for transfer in self._wanted if transfer.seq is not seq]
        if self._naming is not None:
            self._naming.drop_loads(seq)

    def swap_out(self, seq: Sequence, is_branched: bool) -> None:
        """Move what a sequence has computed to host memory, if there is room."""
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
        """Give back the host memory of a sequence that was swapped out."""
        if seq.num_swapped and seq.swap_tier == "host":
            is_branched = seq.branches is not None and seq.branches.is_swapped
            num_blocks = self._num_swap_blocks(seq, seq.num_swapped, is_branched)
            self.num_free_swap_blocks += num_blocks
            if self._naming is not None:
                self._naming.give_up(seq, num_blocks)
        seq.num_swapped = 0
        seq.swap_tier = "host"

    def blocks(self, seq: Sequence) -> tuple[int, ...]:
        """Where what a sequence without branches has computed lies, if blocks are named."""
        return () if self._naming is None else self._naming.blocks(seq, seq.num_computed)

    def _num_swap_blocks(self, seq: Sequence, num_tokens: int, is_branched: bool) -> int:
        """Blocks of the num_tokens tokens that a sequence has computed; branches leave several part full."""
        return self._branched.num_stored_blocks(seq) if is_branched else self._pool.blocks_for(num_tokens)
