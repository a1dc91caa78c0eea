"""The step builder: the methods with which a batching policy builds a step.

The builder reserves blocks and slots immediately and checks every call against budget and memory, so that a
policy cannot leak a block, exceed the budget or compute a token twice.
"""

from __future__ import annotations

from math import inf
from operator import index
from typing import TypeGuard

from policies.caching.branches import Branches
from policies.core.plan import FOREVER, NEW_CHUNK, Cause
from policies.core.sequence import DECODING, PAUSED, PREFILLING, WAITING, Sequence
from policies.core.sequence_view import SequenceView
from policies.core.step_base import StepBase


class StepBuilder(StepBase):
    """The methods that fill a step.

        budget                       limits the tokens of the step
        decode_all, decode, prefill  give tokens to running sequences
        admit                        gives a waiting sequence a slot, KV and tokens
        reserve_first_chunks         lets admissions need room for their first chunk only
        preempt, pause, resume       stop a sequence, or let it continue
        rerank                       asks the scheduling policy for a sequence's rank again
        repeat, hold, wait_until     define for how long the decision holds

    Methods return whether they succeeded; a refusal is normal and changes nothing. An invalid call raises
    ValueError, and so does every call after the end of the step.
    """

    def budget(self, max_num_tokens: int) -> None:
        """Limits this step to max_num_tokens tokens; without this call there is no limit."""
        self.tokens_left = index(max_num_tokens) - self.num_tokens

    def repeat(self, num_iterations: int = FOREVER) -> None:
        """Promises that the policy would decide the same step for num_iterations iterations.

        The promise ends with an event (an arrival, an abort, a finished transfer, the end of a sequence or of
        a prefill, a full KV cache), for which the core checks. Without a promise a step holds for one
        iteration.
        """
        if not (isinstance(num_iterations, int) and num_iterations >= 1):
            raise ValueError(f"repeat({num_iterations}): must be a whole number of iterations >= 1")
        self._promise = num_iterations

    def hold(self, num_iterations: int = FOREVER, until_s: float = inf) -> None:
        """Limits a promise: the policies decide again after num_iterations iterations and at time until_s.

        The smallest of several limits is used. until_s: the first end of an iteration at or after that time.
        """
        if num_iterations < 1:
            raise ValueError(f"hold({num_iterations}): must be a whole number of iterations >= 1")
        self._hold = min(self._hold, num_iterations)
        self._until_s = min(self._until_s, until_s)

    def wait_until(self, time_s: float) -> None:
        """Lets the engine wait until time_s or the next event if this step computes nothing.

        Then the policies are called again; inf: at the next event only. Without this call, a step that
        computes nothing is an error while requests are unfinished.
        """
        self._waits = True
        self._wake_s = min(self._wake_s, time_s)

    def decode_all(self) -> bool:
        """Decodes every decoding sequence in the order of admission, as far as the budget allows.

        If blocks run out, the sequences of largest rank are preempted until the others fit, as by `decode`.
        Returns False if not all sequences decode: the budget is used up, or a sequence was preempted because
        its own rank is the largest. A sequence with branches takes `width` tokens, all or none.
        """
        if not self.is_open:
            self._refuse_late()
        decodes, pool = self._decodes, self._pool
        if decodes.at_limit and (not pool.slides or self._all_fit()):
            self._renew_all()
        num_decodes, branched = decodes.size, self._state.branched.members
        if not num_decodes and not branched:
            return True
        num_due = decodes.blocks_due()
        if num_due > pool.num_free:
            self._state.make_room(num_due)
        fits = num_decodes <= self.tokens_left and num_due <= pool.num_free
        if fits and not (self._decoded or self._all_decode or branched):
            if num_due:
                pool.take(num_due)
            self._all_decode = True
            self.num_tokens += num_decodes
            self.tokens_left -= num_decodes
            return True
        for seq in [seq for seq in self._state.running.values() if seq.state is DECODING]:
            if seq.state is DECODING and not self._has_decoded(seq) and not self.decode(seq):
                return False
        return True

    def decode(self, seq: SequenceView) -> bool:
        """Gives a decoding sequence its next token; False if the budget is used up or this step preempted it.

        A sequence with branches gets one token per branch: seq.width tokens, all or none.
        If it needs a block and none is free, the sequences of largest rank are preempted until one is free.
        """
        if not self._may_decode(seq):
            return False
        if seq.branches is not None:
            return self._decode_branches(seq, seq.branches)
        if seq.request_id in self._decodes.at_limit and not self._renew(seq):
            return False
        num_blocks = self._pool.num_tables if self._decodes.needs_block(seq) else 0
        if not self._make_room(seq, num_blocks):
            return False
        self._pool.take(num_blocks)
        self._decoded[seq.request_id] = seq
        self._spend(1)
        return True

    def _all_fit(self) -> bool:
        """Returns whether the step has tokens and blocks for the next token of every decoding sequence."""
        return self._decodes.size <= self.tokens_left and self._decodes.blocks_due() <= self._pool.num_free

    def _may_decode(self, seq: SequenceView) -> TypeGuard[Sequence]:
        """Returns whether the step has budget for a decoding sequence, and has not preempted it.

        Raises ValueError if the sequence does not decode, or does already in this step.
        """
        if not self.is_open:
            self._refuse_late()
        assert isinstance(seq, Sequence)
        if seq in self._preempted:
            return False
        if seq.state is not DECODING or self._has_decoded(seq):
            raise ValueError(f"{seq!r} cannot decode: not decoding, or decoded in this step already")
        return self.tokens_left >= 1

    def prefill(self, seq: SequenceView, max_num_tokens: int) -> bool:
        """Computes up to max_num_tokens more tokens of a sequence in prefill.

        The number is cut to the budget and to the rest of the prompt. Returns False if that leaves nothing,
        or if the sequence was preempted in this step.
        """
        if not self.is_open:
            self._refuse_late()
        assert isinstance(seq, Sequence)
        if seq in self._preempted:
            return False
        if seq.state is not PREFILLING or any(chunk.seq is seq for chunk in self._chunks):
            raise ValueError(
                f"{seq!r} cannot continue its prefill: not in prefill, or has a chunk in this step already"
            )
        num_tokens = min(index(max_num_tokens), seq.num_uncomputed, self.tokens_left)
        if num_tokens < 1:
            return False
        if self._pool.slides:
            self._pool.slide(seq, seq.stored_computed)
        if not self._make_room(seq, self._num_blocks_of_chunk(seq, num_tokens)):
            return False
        self._add_chunk(seq, num_tokens)
        return True

    def admit(self, seq: SequenceView, max_num_tokens: int, *, may_cut: bool = True) -> bool:
        """Gives a waiting sequence a slot and up to max_num_tokens tokens of prefill, cut to the budget.

        may_cut: if False, the sequence is refused instead of being cut to the budget.
        If a part of its KV is in another tier, it gets slot and blocks and starts to run when the transfer is
        done; likewise while its adapter is being loaded. Returns False if there is no slot or no budget, if
        there is no room for all its known tokens (see `reserve_first_chunks`) or its adapter, or if this step
        has preempted a sequence.
        """
        if not self.is_open:
            self._refuse_late()
        assert isinstance(seq, Sequence)
        if seq.state is not WAITING:
            raise ValueError(f"{seq!r} cannot be admitted: it is not waiting")
        state = self._state
        num_cached = state.transfers.num_cached(seq) if seq.num_swapped else self._pool.num_cached(seq)
        num_wanted = seq.stored_known - num_cached
        if max_num_tokens < num_wanted:
            num_wanted = index(max_num_tokens)
        num_tokens = num_wanted if num_wanted <= self.tokens_left else self.tokens_left
        if num_tokens < 1 or (num_tokens < num_wanted and not may_cut):
            return self._refuse(Cause.budget)
        if not state.free_slots or (seq.request.branching is not None and len(state.free_slots) < seq.width):
            return self._refuse(Cause.slot)
        if self.max_batch_seqs is not None and self._num_in_batch() + seq.width > self.max_batch_seqs:
            return self._refuse(Cause.slot)
        self._reserve(seq, num_cached, num_tokens)
        refusal = state.refusal(seq, num_cached, bool(self._preempted))
        if refusal is not None:
            may_shrink = not self._reserves_all or (not may_cut and seq.stored_known > self.tokens_left)
            if refusal is Cause.memory and num_cached and (may_shrink or self._pool.slides):
                self._hold = 1  # evicted, its prefix needs no blocks, or the cause becomes the budget
            seq.num_unreserved_blocks = 0
            return self._refuse(refusal)
        state.start(seq, num_cached)
        seq.num_unreserved_blocks = 0
        if seq.request_id not in state.loading:
            self._admitted.append(seq)
            self._add_chunk(seq, num_tokens)
        return True

    def reserve_first_chunks(self) -> None:
        """Lets later admissions of this step need room for the cached tokens and the first chunk only.

        Its further chunks may then preempt others. KV from another tier needs room for all known tokens.
        """
        self._reserves_all = False

    def pause(self, seq: SequenceView) -> None:
        """Pauses a decoding sequence until it is resumed; it keeps slot and KV."""
        if not self.is_open:
            self._refuse_late()
        assert isinstance(seq, Sequence)
        if seq.state is not DECODING or self._has_decoded(seq):
            raise ValueError(f"{seq!r} cannot be paused: not decoding, or decoded in this step already")
        self._state.running_set.pause(seq)

    def resume(self, seq: SequenceView) -> None:
        """Lets a paused sequence decode again, in this step if the batching policy gives it a token."""
        if not self.is_open:
            self._refuse_late()
        assert isinstance(seq, Sequence)
        if seq.state is not PAUSED:
            raise ValueError(f"{seq!r} cannot be resumed: it is not paused")
        self._state.running_set.resume(seq)

    def rerank(self, seq: SequenceView) -> None:
        """Asks the scheduling policy for the rank of a sequence again and moves the sequence there."""
        if not self.is_open:
            self._refuse_late()
        assert isinstance(seq, Sequence)
        self._state.rerank(seq)

    def _num_in_batch(self) -> int:
        """Counts the sequences that run and are not in another batch, those admitted now included."""
        state = self._state
        return self._decodes.size + len(state.prefilling) + len(state.branched.members)

    def _refuse(self, cause: Cause) -> bool:
        if self._refusal is None:
            self._refusal = cause
        return False

    def _reserve(self, seq: Sequence, num_cached: int, num_tokens: int) -> None:
        """Sets the blocks of a waiting sequence that need not be free at its admission."""
        self._pool.num_first_tokens = num_cached + num_tokens
        if self._reserves_all:
            return
        num_then = num_cached + num_tokens
        if num_then < seq.stored_known and not (self._state.loads_kv or seq.num_swapped):
            seq.num_unreserved_blocks = self._pool.blocks_for(seq.stored_known) - self._pool.blocks_for(
                num_then
            )

    def _has_decoded(self, seq: SequenceView) -> bool:
        return (self._all_decode and seq.request.branching is None) or seq.request_id in self._decoded

    def _decode_branches(self, seq: Sequence, branches: Branches) -> bool:
        """Gives each branch its next token."""
        if branches.width > self.tokens_left:
            return False
        num_blocks = branches.blocks_to_append()
        if not self._make_room(seq, num_blocks):
            return False
        self._pool.take_extra(num_blocks)
        seq.num_extra_blocks += num_blocks
        self._decoded[seq.request_id] = seq
        self._spend(branches.width)
        return True

    def _num_blocks_of_chunk(self, seq: Sequence, num_tokens: int) -> int:
        """Counts the blocks that the next num_tokens tokens of a sequence in prefill need."""
        num_computed = seq.stored_computed
        return self._pool.blocks_to_grow(seq, num_computed, num_computed + num_tokens)

    def _add_chunk(self, seq: Sequence, num_tokens: int) -> None:
        num_computed = seq.stored_computed
        num_then = num_computed + num_tokens
        self._pool.grow(seq, num_computed, num_then)
        completes = num_then == seq.stored_known
        if completes:
            self._completes = True
        self._chunks.append(NEW_CHUNK((seq, num_computed, num_tokens, completes)))
        self.num_tokens += num_tokens
        self.tokens_left -= num_tokens
