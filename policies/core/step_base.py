"""The state of a step that is being built, and the preemptions by which it gets blocks."""

from __future__ import annotations

from math import inf
from typing import NoReturn

from policies.core.plan import FOREVER, Cause, Chunk
from policies.core.sequence import ACTIVE_STATES, DECODING, ENDING, PREFILLING, Sequence
from policies.core.sequence_view import SequenceView
from policies.core.state import EngineState


class StepBase:
    """The part of the step builder that preempts sequences, when a policy asks or blocks run out.

    `policies.core.step.StepBuilder` adds the methods that give tokens.
    """

    def __init__(self, state: EngineState) -> None:
        self.is_open = False
        """Whether a step is being built."""
        self.max_batch_seqs: int | None = None
        """Maximum number of sequences in a step that admits some; None: the slots limit them alone."""
        self._state = state
        self._pool = state.block_pool
        self._decodes = state.decodes
        self._clear()

    def _clear(self) -> None:
        """Empties the step."""
        self.num_tokens = 0
        """Tokens scheduled in this step."""
        self.tokens_left = FOREVER
        """Tokens that the budget still allows."""
        self._all_decode = False  # whether the whole decode set decodes
        self._decoded: dict[int, Sequence] = {}  # unless _all_decode: sequences that decode, by request id
        self._chunks: list[Chunk] = []
        self._admitted: list[Sequence] = []
        self._preempted: list[Sequence] = []
        self._completes = False  # a chunk completes a prefill, so the next step differs
        self._promise = 1
        self._hold = FOREVER
        self._until_s = self._pool.expires_s
        self._pool.awaits_answer = False
        self._waits = False
        self._wake_s = inf
        self._lacked_blocks = False  # whether a sequence was preempted for lack of blocks
        self._refusal: Cause | None = None  # reason of the first failed admission
        self._reserves_all = True  # whether an admission needs room for all known tokens

    def preempt(self, seq: SequenceView, swap: bool | None = None) -> None:
        """Moves a sequence back to the waiting queue; it loses slot, KV and its part of this step.

        Sequences that this step has admitted with a cache hit on blocks that the preempted sequence would
        have computed are preempted, too. Does nothing if this step has preempted the sequence already.
        swap: if there is room, its computed KV is moved to host memory and loaded when it is admitted again;
        otherwise it is recomputed. None: the scheduling policy's preemption_mode decides. A sequence that was
        admitted in this step has computed nothing and is always recomputed.
        """
        if not self.is_open:
            self._refuse_late()
        assert isinstance(seq, Sequence)
        if seq in self._preempted:
            return
        if seq.state not in ACTIVE_STATES and seq.state is not ENDING:
            raise ValueError(f"{seq!r} cannot be preempted: it must be prefilling, decoding or paused")
        if seq.state is PREFILLING or seq.request.answer_id is not None:
            for other in self._state.running_set.sharers(seq):
                self._take_back(other, swap=False)
        self._take_back(seq, self._state.swaps if swap is None else swap)

    def _make_room(self, seq: Sequence, num_blocks: int) -> bool:
        """Preempts by rank until num_blocks are free; False if `seq` itself was preempted or has to wait.

        It waits while the KV of a sequence of larger rank is being loaded: if it were preempted instead, the
        two could preempt each other without end.
        """
        state = self._state
        while not state.make_room(num_blocks):
            victim = state.running_set.victim()
            if victim is seq and any(other.rank > seq.rank for other in state.loading.values()):
                return False
            num_before = len(self._preempted)
            self.preempt(victim)
            for lost in self._preempted[num_before:]:
                lost.displaced_by = seq.request_id
            self._lacked_blocks = True
            if victim is seq:
                return False
        return True

    def _take_back(self, seq: Sequence, swap: bool) -> None:
        """Preempts a sequence; no other sequence may depend on its part of this step."""
        num_planned = 0
        if seq.state is DECODING:
            if self._all_decode:
                self._decoded = {s.request_id: s for s in self._decodes}
                self._all_decode = False
            num_planned = seq.width if self._decoded.pop(seq.request_id, None) is not None else 0
        elif seq.state is PREFILLING:
            num_planned = sum(chunk.num_tokens for chunk in self._chunks if chunk.seq is seq)
            self._chunks = [chunk for chunk in self._chunks if chunk.seq is not seq]
        self._spend(-num_planned)
        if seq.request_id in self._state.ending:
            assert seq.finish_reason is not None
            self._state.finish(seq, seq.finish_reason, num_planned)
            self._preempted.append(seq)
            return
        if seq in self._admitted:
            self._admitted.remove(seq)
            swap = False  # this step may only now compute its cached KV, so it cannot be stored before
        self._state.stop(seq, num_planned, swap)
        seq.displaced_by = None
        self._preempted.append(seq)

    def _renew_all(self) -> None:
        """Asks the pool about every sequence at its KV limit; sequences without room are preempted."""
        at_limit = self._decodes.at_limit
        slides = self._pool.slides  # vLLM frees in the order of admission, which is that of evictions, too
        for seq in sorted(at_limit.values(), key=lambda seq: seq.admission if slides else seq.request_id):
            if seq.request_id in at_limit:
                self._renew(seq)

    def _renew(self, seq: Sequence) -> bool:
        """Asks the pool for the further growth of a sequence at its KV limit.

        If it cannot grow, preempts it and returns False.
        """
        self._decodes.leave(seq, PREFILLING)
        self._pool.slide(seq, seq.stored_computed)
        growth = self._pool.growth(seq)
        self._decodes.join(seq, growth or seq.growth)
        if growth is None:
            self.preempt(seq)
            seq.displaced_by = seq.request_id
            self._lacked_blocks = True
            return False
        return True

    def _spend(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self.tokens_left -= num_tokens

    def _refuse_late(self) -> NoReturn:
        raise ValueError("this step has ended: a builder may only be used in the fill() that received it")
