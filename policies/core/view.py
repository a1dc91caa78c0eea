"""What a policy may look at: the engine, read-only."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from policies.core.sequence import Sequence, SequenceState
from policies.core.sequence_view import SequenceView

if TYPE_CHECKING:
    from policies.core.engine import EngineCore


class StepView:
    """What a policy may look at. Nothing here tells how long an answer will be."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    @property
    def decoding(self) -> SequenceOf[SequenceView]:
        """Sequences with one uncomputed token each, in the order of their admission."""
        return [seq for seq in self._core.running.values() if seq.state is SequenceState.decoding]

    @property
    def prefilling(self) -> SequenceOf[SequenceView]:
        """Sequences whose prefill has begun, by admission or as the scheduling policy's chunk_rank says."""
        core = self._core
        if not core.prefilling:
            return ()
        if core._hooks.chunk_rank:
            key = core.scheduling.chunk_rank
            return sorted(core.prefilling.values(), key=lambda seq: (key(seq), seq.request_id))
        return list(core.prefilling.values())

    @property
    def running(self) -> SequenceOf[SequenceView]:
        """Sequences that hold a slot, in the order of their admission."""
        return list(self._core.running.values())

    @property
    def paused(self) -> SequenceOf[SequenceView]:
        """Sequences that were paused, in that order."""
        return list(self._core.paused.values())

    @property
    def waiting(self) -> Iterable[SequenceView]:
        """Sequences without KV, smallest rank first; may be admitted while iterating.

        Those whose adapter finds no slot are passed over.
        """
        core = self._core
        if not core.num_waiting:
            return ()
        residents = core.residents
        if residents is None:
            return iter(core.waiting)
        return (seq for seq in core.waiting if residents.may_start(seq))

    @property
    def num_decoding(self) -> int:
        """How many decode; one with branches counts once."""
        return self._core.decodes.size + len(self._core.branched.members)

    @property
    def num_running(self) -> int:
        """How many hold a slot: decoding, in prefill, paused, loading or leaving; this step's included."""
        return len(self._core.running)

    @property
    def num_waiting(self) -> int:
        """How many wait."""
        return self._core.num_waiting

    @property
    def num_free_blocks(self) -> int:
        """KV blocks nobody owns, after what this step reserved so far; with those of adapters nobody uses."""
        core = self._core
        if core.residents is None:
            return core.pool.num_free
        return core.pool.num_free + core.residents.num_idle_blocks()

    @property
    def num_free_swap_blocks(self) -> int:
        """Blocks' worth of host memory that is left for preempted KV."""
        return self._core.num_free_swap_blocks

    def num_blocks_held(self, seq: SequenceView) -> int:
        """KV blocks that a running sequence owns, those shared with others included."""
        assert isinstance(seq, Sequence)
        return self._core.pool.blocks_held(seq, self._core.running_set.num_pooled(seq)) + seq.num_apart

    def num_blocks_to_admit(self, seq: SequenceView) -> int:
        """KV blocks that a waiting sequence would hold when all its known tokens are computed."""
        assert isinstance(seq, Sequence)
        return self._core.pool.blocks_to_admit(seq)

    def num_blocks_missing(self, seq: SequenceView) -> int:
        """KV blocks that a begun prefill does not hold yet for the tokens that are known."""
        assert isinstance(seq, Sequence)
        return self._core.pool.blocks_to_grow(seq, seq.num_computed, seq.num_known)

    def has_room(self, seq: SequenceView) -> bool:
        """Whether a waiting sequence would find a slot and memory now; budget and policies aside."""
        assert isinstance(seq, Sequence)
        core = self._core
        if len(core.free_slots) < seq.width:
            return False
        num_cached = core.transfers.num_cached(seq)
        if core.residents is not None and not core.residents.may_start(seq):
            return False
        return core.can_admit(seq, num_cached)

    @property
    def num_blocks(self) -> int:
        """KV blocks there are."""
        return self._core.pool.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens in a KV block."""
        return self._core.pool.block_size

    @property
    def num_iterations(self) -> int:
        """Iterations that the engine has run."""
        return self._core.num_iterations

    def needs_block(self, seq: SequenceView) -> bool:
        """Whether the next token of a decoding sequence takes a KV block that it does not hold yet."""
        assert isinstance(seq, Sequence)
        if seq.branches is not None:
            return seq.branches.blocks_to_append() > 0
        return seq.growth.takes_blocks and seq.num_held % self._core.pool.block_size == 0

    def num_found(self, seq: SequenceView) -> int:
        """Tokens of a waiting sequence that would not be computed: a cache or another tier has their KV."""
        assert isinstance(seq, Sequence)
        transfers = self._core.transfers
        num_cached = transfers.num_cached(seq)
        return num_cached + transfers.num_loadable(seq, num_cached)

    @property
    def max_num_seqs(self) -> int:
        """Slots: how many sequences may hold KV at once."""
        return self._core.max_num_seqs
