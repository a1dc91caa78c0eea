"""The running sequences of an engine that speculates."""

from __future__ import annotations

from policies.caching.pool import BlockPool
from policies.core.running_set import RunningSet
from policies.core.sequence import DECODING, ENDING, Sequence, SequenceState
from policies.speculation.engine.draft_set import DraftSet


class DraftRunningSet(RunningSet):
    """A `RunningSet` with a `DraftSet`, and with KV slots behind the computed tokens of sequences."""

    def __init__(self, pool: BlockPool, max_num_seqs: int, max_model_len: int) -> None:
        super().__init__(pool, max_num_seqs)
        self.drafting = DraftSet(max_num_seqs, pool, self.running, max_model_len)
        self.decodes = self.drafting
        self._has_left_decodes = False

    def admit(self, seq: Sequence, num_cached: int, num_loaded: int, lacks_adapter: bool) -> None:
        """Admits a waiting sequence, as `RunningSet.admit` does; it has no draft tokens yet."""
        super().admit(seq, num_cached, num_loaded, lacks_adapter)
        self.drafting.admit(seq)

    def num_pooled(self, seq: Sequence) -> int:
        """Counts the tokens for which the pool counts blocks as the sequence's own."""
        if seq.state is DECODING:
            return int(self.drafting.blocks_S[seq.slot]) * self._pool.block_size
        return super().num_pooled(seq)

    def end_late(self, seq: Sequence) -> None:
        """Keeps a sequence with a complete output until the next commit, as `RunningSet.end_late` does.

        It decodes once more unless one token of its last pass alone was sure to reach its limit.
        """
        if seq.state is not DECODING:
            super().end_late(seq)
            return
        self.ending[seq.request_id] = seq
        if self.drafting.num_certain(seq) >= seq.max_num_tokens:
            self.drafting.leave(seq, ENDING)
        else:
            self.drafting.stay(seq)

    def leave(self, seq: Sequence, state: SequenceState) -> int | None:
        """Removes a sequence from its set and frees its slots; `release` must follow."""
        self._has_left_decodes = seq.state is DECODING
        return super().leave(seq, state)

    def release(self, seq: Sequence, num_branched: int | None, num_planned: int) -> None:
        """Frees the blocks of a sequence that has left; those of a planned pass are extra blocks."""
        super().release(seq, num_branched, 0 if self._has_left_decodes else num_planned)
