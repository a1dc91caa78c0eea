"""The step builder of an engine that speculates: a decode takes its draft tokens with it.

The rules are those of vLLM 0.32. A decode asks for 1 + K tokens; those beyond the budget or the model's
context are cut. It takes KV slots for all of them and, for proposers with KV of their own, for K more. Slots
of rejected tokens are kept. A request that is admitted with one token left to compute gets K rows of padding,
so that all sequences of a step without prompts have equally many rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from policies.core.plan import FOREVER, Cause, StepPlan
from policies.core.sequence import DECODING, Sequence
from policies.core.sequence_view import SequenceView
from policies.core.state import EngineState
from policies.core.step import StepBuilder
from policies.speculation.engine.draft_set import DraftSet
from policies.speculation.engine.drafts import DraftPlan, Ints, Shapes, Speculation
from policies.speculation.fixed import Fixed

MAX_HORIZON = 512
"""Iterations of a plan with drafts at most: their acceptances are drawn together."""


class _Together(NamedTuple):
    """All decoding sequences with all their draft tokens; see `DraftPlan`. num_tokens: those of drafts."""

    slots: Ints
    base: Ints
    num_drafts: Ints
    reach: Ints
    num_tokens: int


class DraftStep(StepBuilder):
    """Builds the steps of an engine that speculates.

    max_inputs: tokens of a batch, those of drafting included.
    """

    _together: _Together  # if all decode

    def __init__(
        self, state: EngineState, speculation: Speculation, decodes: DraftSet, max_inputs: int
    ) -> None:
        self._shapes = Shapes(speculation.proposer)
        self._rules = speculation.proposer.rules
        decodes.num_lookahead = self._shapes.num_rows if self._rules.keeps_lookahead else 0
        decodes.margin = 4 * self._shapes.num_rows + 1 + decodes.num_lookahead
        self._ahead = np.array([1 + decodes.num_lookahead])
        self._block_size = np.array([decodes.block_size])
        self._rounding = self._block_size - 1
        self._num_padding = 0
        policy = speculation.draft_length
        self._is_fixed = isinstance(policy, Fixed)  # it does not read the step
        if isinstance(policy, Fixed) and self._shapes.is_chain:
            num_rows = self._shapes.num_rows
            self._num_padding = num_rows if policy.num_tokens is None else min(policy.num_tokens, num_rows)
        self._drafting = decodes
        self._max_inputs = max_inputs
        super().__init__(state)

    def _clear(self) -> None:
        super()._clear()
        self._rows: dict[int, int] = {}  # draft tokens of the sequences that decode one by one, by request id
        self._padded: dict[int, int] = {}  # padding rows of admitted requests, by request id
        self._num_requests = 0  # requests with tokens in this step
        self._has_prefilled = False  # whether a running request is in prefill in this step
        self._token_budget = self._input_budget = FOREVER
        self._num_rows_now = 0  # padding of the request that is being admitted
        self.has_read = False
        """Whether the tokens of the step before have been read because this one has none."""

    # Budgets.

    def budget(self, max_num_tokens: int) -> None:
        """Limits this step to max_num_tokens tokens, and to the batch's tokens with those of drafting."""
        super().budget(max_num_tokens)
        self._token_budget = self.tokens_left + self.num_tokens
        self._input_budget = max(self._max_inputs, self._token_budget)
        self._update_left()

    def begin_rank(self) -> None:
        """Begins the part of one rank of data-parallel attention, with budgets of its own."""
        super().begin_rank()
        self._num_requests, self._has_prefilled = 0, False
        self._token_budget = self._input_budget = FOREVER

    def _spend_on(self, num_tokens: int, num_requests: int = 1) -> None:
        """Takes the tokens of requests from the budgets."""
        self.num_tokens += num_tokens
        self._num_requests += num_requests
        self._update_left()

    def _update_left(self) -> None:
        num_slots = self._rules.num_input_slots * (self._num_requests + 1)
        inputs_left = self._input_budget - num_slots
        self.tokens_left = max(min(self._token_budget, inputs_left) - self.num_tokens, 0)

    @property
    def has_freed(self) -> bool:
        """True if the step has made room without computing anything, so that another attempt may succeed."""
        return self.has_read or bool(self._preempted)

    # Decodes.

    def decode_all(self) -> bool:
        """Decodes every decoding sequence in the order of admission, as far as the budget allows."""
        if not self.is_open:
            self._refuse_late()
        if not self._drafting.size:
            return True
        may_join = not (self.is_of_rank or self._decoded or self._all_decode)
        return (may_join and self.decode_together()) or self._decode_each()

    def decode_together(self) -> bool:
        """Decodes all sequences with all their draft tokens; false, without a change, if there is no room."""
        together = self._take_together(self.tokens_left)
        if together is None:
            return False
        decodes, self._together = self._drafting, together
        self._all_decode = True
        self._spend_on(together.num_tokens + decodes.size, decodes.size)
        if self._pool.needs_offers:
            for seq in decodes.members:
                self._offer(seq)
        return True

    def unasked(self, max_num_tokens: int) -> StepPlan | None:
        """Returns a step of max_num_tokens in which all decode, which is repeated; None: there is no room."""
        decodes, pool = self._drafting, self._pool
        if pool.needs_offers or not self._is_fixed:
            self.begin()
            self.budget(max_num_tokens)
            if not self.decode_together():
                return None
            self.repeat()
            return self.end()
        inputs_left = max(self._max_inputs, max_num_tokens) - self._rules.num_input_slots
        together = self._take_together(min(max_num_tokens, inputs_left))
        if together is None:
            return None
        context = decodes.num_context_tokens + decodes.size
        plan = StepPlan(pool.num_iterations, decodes.size, context, 0, decodes, MAX_HORIZON, pool.expires_s)
        plan.drafts = self._new_drafts(decodes.members, *together)
        plan.is_unasked = True
        self._state.complete(plan, {})
        return plan

    def _take_together(self, tokens_left: int) -> _Together | None:
        """Takes the blocks for all sequences with all their draft tokens; None, without a change: no room."""
        decodes = self._drafting
        slots = decodes.slots
        num_drafts = decodes.drafts_S[slots]
        num_tokens = int(np.add.reduce(num_drafts))
        if num_tokens + len(slots) + self._rules.num_input_slots * (len(slots) - 1) > tokens_left:
            return None
        base, reach = decodes.base_S[slots], num_drafts + self._ahead
        end: Ints = base + reach
        if not decodes.is_far and end.max() >= decodes.max_model_len + decodes.num_lookahead:
            return None
        if not self._take_blocks(slots, end):
            return None
        return _Together(slots, base, num_drafts, reach, num_tokens)

    def _offer(self, seq: Sequence) -> None:
        """Offers the tokens of a sequence that this step decodes to the cache."""
        self._pool.offer_known(seq, self.num_readable(seq, None))

    def _take_blocks(self, slots: Ints, end: Ints) -> bool:
        """Takes the blocks that sequences need for KV slots up to `end`; false, without a change: no room."""
        decodes, pool = self._drafting, self._pool
        held = decodes.blocks_S[slots]
        if not np.count_nonzero(end > held * self._block_size):
            return True
        num_new = self.blocks_for(end)
        num_new -= held
        np.maximum(num_new, 0, out=num_new)
        num_blocks = int(np.add.reduce(num_new))
        if num_blocks > pool.num_free and not self._state.make_room(num_blocks):
            return False
        pool.take(num_blocks)
        decodes.blocks_S[slots] += num_new
        return True

    def blocks_for(self, num_slots: Ints) -> Ints:
        """Converts numbers of KV slots, cut to the model's context, to those of their blocks, in place."""
        decodes = self._drafting
        if not decodes.is_far:
            np.minimum(num_slots, decodes.max_slots, out=num_slots)
        num_slots += self._rounding
        num_slots //= self._block_size
        return num_slots

    def decode(self, seq: SequenceView) -> bool:
        """Gives a decoding sequence its next tokens; False if the budget is used up or it was preempted.

        Returns true without a token if the rows of its step in flight may already fill the model's context.
        """
        if not self._may_decode(seq):
            return False
        decodes, slot = self._drafting, seq.slot
        assert slot is not None
        base = int(decodes.base_S[slot])
        wanted = min(int(decodes.drafts_S[slot]) + 1, decodes.max_model_len - 1 - base)
        if wanted < 1:
            return True
        num_drafts = int(self._shapes.whole_levels(np.array([min(wanted, self.tokens_left) - 1]))[0])
        num_slots = min(base + 1 + num_drafts + decodes.num_lookahead, decodes.max_slots)
        num_blocks = max(self._pool.blocks_for(num_slots) - int(decodes.blocks_S[slot]), 0)
        if not self._make_room(seq, num_blocks):
            return False
        self._pool.take(num_blocks)
        decodes.blocks_S[slot] += num_blocks
        self._decoded[seq.request_id] = seq
        self._rows[seq.request_id] = num_drafts
        self._spend_on(1 + num_drafts)
        if self._pool.needs_offers:
            self._offer(seq)
        return True

    # Prompts.

    def prefill(self, seq: SequenceView, max_num_tokens: int) -> bool:
        """Computes up to max_num_tokens more tokens of a prompt, as `StepBuilder.prefill` does."""
        assert isinstance(seq, Sequence)
        max_num_tokens = self._cut_to_lookahead(seq, seq.stored_computed, max_num_tokens)
        if max_num_tokens < 1 <= self.tokens_left:
            return True  # it waits for a budget that holds the rest of its prompt
        served = super().prefill(seq, max_num_tokens)
        self._has_prefilled |= served
        return served

    def admit(self, seq: SequenceView, max_num_tokens: int, *, may_cut: bool = True) -> bool:
        """Gives a waiting sequence a slot and tokens of prefill, as `StepBuilder.admit` does."""
        assert isinstance(seq, Sequence)
        if self._num_padding or self._rules.prefill_lookahead:
            num_cached = (
                self._state.transfers.num_cached(seq) if seq.num_swapped else self._pool.num_cached(seq)
            )
            if self._rules.prefill_lookahead:
                num_found = num_cached + self._state.transfers.num_loadable(seq, num_cached)
                max_num_tokens = self._cut_to_lookahead(seq, num_found, max_num_tokens)
                if max_num_tokens < 1 <= self.tokens_left and self._state.release.skips_unfit:
                    self._refuse(Cause.budget)
                    return True  # those behind it may fit
            self._num_rows_now = self._padding_of(seq, num_cached)
            if max_num_tokens < 1 or 1 + self._num_rows_now > self.tokens_left:
                if num_cached:
                    self._hold = 1  # with a shorter hit, it has more tokens to compute and no padding
                return self._refuse(Cause.budget)
        may_cut |= seq.num_uncomputed > self._input_budget - self._rules.num_input_slots  # or it would starve
        is_admitted = super().admit(seq, max_num_tokens, may_cut=may_cut)
        self._num_rows_now = 0
        return is_admitted

    def _padding_of(self, seq: Sequence, num_cached: int) -> int:
        """Returns the padding rows of a request that would be admitted now."""
        num_padding = self._num_padding
        if not num_padding or seq.stored_known - num_cached != 1 or self._has_prefilled:
            return 0
        if not (self._decoded or self._all_decode or num_cached):
            return 0
        fits = num_cached + num_padding + 2 <= self._drafting.max_model_len
        return num_padding if fits else 0

    def _cut_to_lookahead(self, seq: Sequence, num_computed: int, max_num_tokens: int) -> int:
        """Cuts a chunk so that it does not end shortly before the end of the prompt."""
        lookahead = self._rules.prefill_lookahead
        num_left = seq.stored_known - num_computed
        num_tokens = min(max_num_tokens, num_left, self.tokens_left)
        num_after = num_left - num_tokens
        if not 0 < num_after < lookahead:
            return max_num_tokens
        num_cut = num_tokens - (lookahead - num_after)
        if num_cut > 0 or num_left > self.tokens_left:
            return max(num_cut, 0)
        return num_left  # a policy's limit alone must not keep it from its end

    def _slots_end(self, num_tokens: int) -> int:
        """Returns the KV slots of a sequence that computes a chunk up to num_tokens tokens."""
        num_ahead = self._num_rows_now + self._drafting.num_lookahead
        return min(num_tokens + num_ahead, max(self._drafting.max_slots, num_tokens))

    def _reserve(self, seq: Sequence, num_cached: int, num_tokens: int) -> None:
        super()._reserve(seq, num_cached, num_tokens)
        blocks_for = self._pool.blocks_for
        num_counted = blocks_for(seq.stored_known) - seq.num_unreserved_blocks
        num_needed = blocks_for(self._slots_end(num_cached + num_tokens))
        seq.num_unreserved_blocks -= max(num_needed - num_counted, 0)

    def _num_blocks_of_chunk(self, seq: Sequence, num_tokens: int) -> int:
        num_then = seq.stored_computed + num_tokens
        blocks_for = self._pool.blocks_for
        num_held = blocks_for(seq.stored_computed) + seq.num_extra_blocks
        return max(blocks_for(self._slots_end(num_then)) - num_held, 0)

    def _add_chunk(self, seq: Sequence, num_tokens: int) -> None:
        """Adds a chunk; the sequence also takes the KV slots behind it that drafting needs."""
        pool, blocks_for = self._pool, self._pool.blocks_for
        num_then = seq.stored_computed + num_tokens
        num_held = blocks_for(seq.stored_computed) + seq.num_extra_blocks
        pool.free_extra(seq.num_extra_blocks, ())
        super()._add_chunk(seq, num_tokens)
        num_slots = max(blocks_for(self._slots_end(num_then)), num_held)
        seq.num_extra_blocks = num_slots - blocks_for(num_then)
        pool.take_extra(seq.num_extra_blocks)
        num_rows = self._num_rows_now
        if num_rows:
            self._padded[seq.request_id] = num_rows
        self._spend_on(num_rows)

    # The end of a step.

    def _take_back(self, seq: Sequence, swap: bool) -> None:
        request_id = seq.request_id
        if seq.state is DECODING and self._all_decode:
            self._decode_singly()
        has_tokens = request_id in self._decoded or any(chunk.seq is seq for chunk in self._chunks)
        num_rows = self._rows.pop(request_id, 0) + self._padded.pop(request_id, 0)
        if seq.state is DECODING and has_tokens:
            self._drafting.tell(seq)
        super()._take_back(seq, swap)
        self._spend_on(-num_rows, -int(has_tokens))

    def _decode_singly(self) -> None:
        """Lists the sequences that decode together one by one."""
        decodes = self._drafting
        members = decodes.members
        self._decoded = {seq.request_id: seq for seq in members}
        self._rows = dict(zip(self._decoded, decodes.drafts_S[decodes.slots].tolist(), strict=True))
        self._all_decode = False

    def _complete(self, plan: StepPlan) -> None:
        plan.drafts = drafts = self._drafts()
        plan.num_widening = 0
        num_seqs = len(drafts.seqs)
        plan.num_decode_context_tokens = self._drafting.num_tokens_of(drafts) + num_seqs
        for request_id, num_rows in self._padded.items():
            drafts.pad(request_id, num_rows)
        self._state.complete(plan, self._decoded)
        is_fixed = self._all_decode and not (plan.chunks or self._pool.needs_offers)
        if plan.horizon < FOREVER:  # a promise in tokens of a sequence, of which a pass gives several
            plan.horizon = max(plan.horizon // (1 + int(drafts.depth.max(initial=0))), 1)
        plan.horizon = min(plan.horizon, MAX_HORIZON) if is_fixed else 1

    def _drafts(self) -> DraftPlan:
        """Returns the draft tokens of the sequences that decode in this step."""
        decodes = self._drafting
        if self._all_decode and self._together.slots is decodes.slots:
            return self._new_drafts(decodes.members, *self._together)
        if self._all_decode:  # a policy has resumed others
            seqs, slots = decodes.members, decodes.slots
            num_drafts = decodes.drafts_S[slots]
        else:
            seqs = (
                [seq for seq in decodes.members if seq.request_id in self._decoded] if self._decoded else []
            )
            slots = np.array([seq.slot for seq in seqs], np.int64)
            num_drafts = np.array([self._rows[seq.request_id] for seq in seqs], np.int64)
        num_tokens, reach = int(np.add.reduce(num_drafts)), num_drafts + self._ahead
        return self._new_drafts(seqs, slots, decodes.base_S[slots], num_drafts, reach, num_tokens)

    def _new_drafts(
        self, seqs: list[Sequence], slots: Ints, base: Ints, num_drafts: Ints, reach: Ints, num_tokens: int
    ) -> DraftPlan:
        """Returns the draft tokens of some sequences."""
        decodes = self._drafting
        depth = num_drafts if self._shapes.is_chain else self._shapes.depth[num_drafts]
        computed, end = decodes.computed_S[slots], decodes.end_S[slots]
        drafts = DraftPlan(seqs, slots, computed, base, end, num_drafts, depth, reach, num_tokens)
        drafts.ids, drafts.num_changes = decodes.ids_S[slots], decodes.num_changes
        if drafts.num_tokens == len(seqs) * self._shapes.num_rows:
            drafts.common = self._shapes.num_rows
        return drafts

    def num_readable(self, seq: Sequence, in_flight: StepPlan | None) -> int:
        """Counts the first tokens of a running sequence that a prefix cache knows by now."""
        if seq.state is not DECODING:
            return seq.num_computed - seq.num_unread - self._pool.num_reprefillable_tokens
        if in_flight is not None:
            assert isinstance(in_flight.drafts, DraftPlan)
            has_decoded = seq in in_flight.drafts.seqs
        else:
            has_decoded = self.is_open and self._has_decoded(seq)
        if self._pool.lookahead:  # the token of this step is known, but not the one after it
            has_decoded = False
        num_known = self._drafting.num_readable(seq, has_decoded=has_decoded)
        return num_known - self._pool.num_reprefillable_tokens
