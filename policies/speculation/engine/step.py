"""The part of draft tokens in a step, for `policies.core.step.StepBuilder`. The rules follow vLLM 0.32.

A decode requests 1 + K tokens; tokens beyond the budget or the model's context are cut. It takes KV slots for
all of them and, for proposers with their own KV, for K more. Slots of rejected tokens are kept. A request
that is admitted with one token left to compute gets K rows of padding, so that all sequences of a step
without prompts have equal numbers of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from policies.core.plan import FOREVER, StepPlan
from policies.core.sequence import DECODING, Sequence
from policies.core.state import EngineState
from policies.speculation.draft_lengths import Fixed
from policies.speculation.engine.draft_set import DraftSet
from policies.speculation.engine.drafts import DraftPlan, Ints, Shapes, Speculation

MAX_HORIZON = 512
"""Maximum number of iterations of a plan with drafts, because their acceptances are drawn together."""


class _Together(NamedTuple):
    """All decoding sequences with all their draft tokens; see `DraftPlan`. num_tokens: draft tokens."""

    slots: Ints
    base: Ints
    num_drafts: Ints
    reach: Ints
    num_tokens: int


class DraftRows:
    """Budgets, KV slots and padding of the draft tokens in the step being built.

    max_inputs: tokens of a batch, including those of drafting.
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
        self.cuts_prompts = bool(self._num_padding or self._rules.prefill_lookahead)
        """Whether an admission may take more than the tokens of its chunk, or fewer than granted."""
        self._state = state
        self._pool = state.block_pool
        self._drafting = decodes
        self._max_inputs = max_inputs

    def clear(self) -> None:
        """Begins an empty step."""
        self._rows: dict[int, int] = {}  # draft tokens of the sequences that decode one by one, by request id
        self._padded: dict[int, int] = {}  # padding rows of admitted requests, by request id
        self.may_skip = False
        """Whether prompts behind the one refused by `fit` may fit."""
        self.begin_rank()

    # Budgets.

    def begin_rank(self) -> None:
        """Begins the part of one rank of data-parallel attention, with its own budgets."""
        self._num_requests = 0  # requests with tokens in this step
        self.has_prefilled = False
        """Whether a running request is in prefill in this step."""
        self._token_budget = self._input_budget = FOREVER

    def limit(self, max_num_tokens: int) -> None:
        """Limits this step to max_num_tokens tokens, and to the batch limit that includes drafting."""
        self._token_budget = max_num_tokens
        self._input_budget = max(self._max_inputs, max_num_tokens)

    def tokens_left(self, num_tokens: int, num_requests: int) -> int:
        """Returns the tokens left by the budgets in a step of num_tokens, after further requests."""
        self._num_requests += num_requests
        num_slots = self._rules.num_input_slots * (self._num_requests + 1)
        return max(min(self._token_budget, self._input_budget - num_slots) - num_tokens, 0)

    # Decodes.

    def take_all(self, tokens_left: int) -> int | None:
        """Reserves everything for all draft tokens of all sequences.

        Returns the tokens, or None without room.
        """
        together = self._take_together(tokens_left) if self._drafting.size else None
        if together is None:
            return None
        self._together = together
        if self._pool.needs_offers:
            for seq in self._drafting.members:
                self._offer(seq)
        return together.num_tokens + self._drafting.size

    @property
    def is_alike(self) -> bool:
        """True if the rows of a step in which all decode depend only on the numbers of tokens."""
        return self._is_fixed and not self._pool.needs_offers

    def unasked(self, max_num_tokens: int) -> StepPlan | None:
        """Returns a step of max_num_tokens in which all decode, if they are alike.

        None if there is no room.
        """
        decodes, pool = self._drafting, self._pool
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
        """Takes the blocks for all sequences with all draft tokens; without room returns None, unchanged."""
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
        self._pool.offer_known(seq, self.num_readable(seq, None, has_decoded=True))

    def _take_blocks(self, slots: Ints, end: Ints) -> bool:
        """Takes the blocks of sequences for KV slots up to `end`; without room returns False, unchanged."""
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
        """Converts numbers of KV slots, limited by the model's context, to numbers of blocks, in place."""
        decodes = self._drafting
        if not decodes.is_far:
            np.minimum(num_slots, decodes.max_slots, out=num_slots)
        num_slots += self._rounding
        num_slots //= self._block_size
        return num_slots

    def next_pass(self, seq: Sequence, tokens_left: int) -> tuple[int, int]:
        """Returns the tokens and the KV blocks of the next pass of a sequence.

        Returns 0 tokens if the rows of its step in flight may already fill the model's context.
        """
        decodes, slot = self._drafting, seq.slot
        assert slot is not None
        base = int(decodes.base_S[slot])
        wanted = min(int(decodes.drafts_S[slot]) + 1, decodes.max_model_len - 1 - base)
        if wanted < 1:
            return 0, 0
        num_tokens = 1 + int(self._shapes.whole_levels(np.array([min(wanted, tokens_left) - 1]))[0])
        num_slots = min(base + num_tokens + decodes.num_lookahead, decodes.max_slots)
        return num_tokens, max(self._pool.blocks_for(num_slots) - int(decodes.blocks_S[slot]), 0)

    def add_pass(self, seq: Sequence, num_tokens: int, num_blocks: int) -> None:
        """Adds the pass of a sequence that has its blocks."""
        self._drafting.blocks_S[seq.slot] += num_blocks
        self._rows[seq.request_id] = num_tokens - 1
        if self._pool.needs_offers:
            self._offer(seq)

    # Prompts.

    def fit(
        self, seq: Sequence, num_cached: int, max_num_tokens: int, tokens_left: int, has_decodes: bool
    ) -> tuple[int, int, bool]:
        """Fits a waiting prompt into a step.

        Returns the maximum number of tokens that it may get (0: no chunk fits), its rows of padding, and
        whether its chunk must be cut to the budget because it would otherwise starve. has_decodes: whether
        sequences decode.
        """
        self.may_skip, num_rows = False, 0
        if self._rules.prefill_lookahead:
            num_found = num_cached + self._state.transfers.num_loadable(seq, num_cached)
            max_num_tokens = self.cut(seq, num_found, max_num_tokens, tokens_left)
            self.may_skip = max_num_tokens < 1 <= tokens_left and self._state.release.skips_unfit
        if self.cuts_prompts:
            num_rows = self._padding_of(seq, num_cached, has_decodes)
            if num_rows >= tokens_left:
                max_num_tokens = 0
        return max_num_tokens, num_rows, seq.num_uncomputed > self._input_budget - self._rules.num_input_slots

    def _padding_of(self, seq: Sequence, num_cached: int, has_decodes: bool) -> int:
        """Returns the padding rows of a request that would be admitted now."""
        num_padding = self._num_padding
        if not num_padding or seq.stored_known - num_cached != 1 or self.has_prefilled:
            return 0
        if not (has_decodes or num_cached):
            return 0
        fits = num_cached + num_padding + 2 <= self._drafting.max_model_len
        return num_padding if fits else 0

    def cut(self, seq: Sequence, num_computed: int, max_num_tokens: int, tokens_left: int) -> int:
        """Shortens a chunk that would end shortly before the end of the prompt."""
        lookahead = self._rules.prefill_lookahead
        num_left = seq.stored_known - num_computed
        num_tokens = min(max_num_tokens, num_left, tokens_left)
        num_after = num_left - num_tokens
        if not 0 < num_after < lookahead:
            return max_num_tokens
        num_cut = num_tokens - (lookahead - num_after)
        if num_cut > 0 or num_left > tokens_left:
            return max(num_cut, 0)
        return num_left  # a policy's limit alone must not prevent the last chunk

    def _slots_end(self, num_tokens: int, num_rows: int = 0) -> int:
        """Returns the KV slots of a sequence that computes a chunk up to num_tokens tokens."""
        num_ahead = num_rows + self._drafting.num_lookahead
        return min(num_tokens + num_ahead, max(self._drafting.max_slots, num_tokens))

    def num_blocks_behind(self, seq: Sequence, num_then: int, num_rows: int) -> int:
        """Counts the blocks that an admission needs in addition to those reserved for its known tokens."""
        blocks_for = self._pool.blocks_for
        num_counted = blocks_for(seq.stored_known) - seq.num_unreserved_blocks
        return max(blocks_for(self._slots_end(num_then, num_rows)) - num_counted, 0)

    def blocks_to_grow(self, seq: Sequence, num_then: int) -> int:
        """Counts the blocks that a sequence in prefill needs for a chunk up to num_then tokens."""
        blocks_for = self._pool.blocks_for
        num_held = blocks_for(seq.stored_computed) + seq.num_extra_blocks
        return max(blocks_for(self._slots_end(num_then)) - num_held, 0)

    def grow(self, seq: Sequence, num_then: int, num_rows: int) -> None:
        """Takes the KV slots of a chunk up to num_then tokens, and the following slots for drafting."""
        pool, blocks_for, num_computed = self._pool, self._pool.blocks_for, seq.stored_computed
        num_held = blocks_for(num_computed) + seq.num_extra_blocks
        pool.free_extra(seq.num_extra_blocks, ())
        pool.grow(seq, num_computed, num_then)
        num_slots = max(blocks_for(self._slots_end(num_then, num_rows)), num_held)
        seq.num_extra_blocks = num_slots - blocks_for(num_then)
        pool.take_extra(seq.num_extra_blocks)
        if num_rows:
            self._padded[seq.request_id] = num_rows

    # The end of a step.

    def take_back(self, seq: Sequence, has_tokens: bool) -> int:
        """Removes the rows of a sequence that loses its part of the step; returns their number."""
        if seq.state is DECODING and has_tokens:
            self._drafting.tell(seq)
        return self._rows.pop(seq.request_id, 0) + self._padded.pop(seq.request_id, 0)

    def list_rows(self) -> None:
        """Lists the rows of jointly decoding sequences one by one."""
        decodes = self._drafting
        request_ids = [seq.request_id for seq in decodes.members]
        self._rows = dict(zip(request_ids, decodes.drafts_S[decodes.slots].tolist(), strict=True))

    def complete(self, plan: StepPlan, decoded: dict[int, Sequence] | None) -> None:
        """Adds the draft tokens to a plan. decoded: decoding sequences, by request id; None: all."""
        plan.drafts = drafts = self._drafts(decoded)
        plan.num_widening = 0
        plan.num_decode_context_tokens = self._drafting.num_tokens_of(drafts) + len(drafts.seqs)
        for request_id, num_rows in self._padded.items():
            drafts.pad(request_id, num_rows)
        is_fixed = decoded is None and not (plan.chunks or self._pool.needs_offers)
        if plan.horizon < FOREVER:  # a promise in tokens per sequence; a pass yields several
            plan.horizon = max(plan.horizon // (1 + int(drafts.depth.max(initial=0))), 1)
        plan.horizon = min(plan.horizon, MAX_HORIZON) if is_fixed else 1

    def _drafts(self, decoded: dict[int, Sequence] | None) -> DraftPlan:
        """Returns the draft tokens of the sequences that decode in this step."""
        decodes = self._drafting
        if decoded is None and self._together.slots is decodes.slots:
            return self._new_drafts(decodes.members, *self._together)
        if decoded is None:  # a policy has resumed others
            seqs, slots = decodes.members, decodes.slots
            num_drafts = decodes.drafts_S[slots]
        else:
            seqs = [seq for seq in decodes.members if seq.request_id in decoded] if decoded else []
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

    def num_readable(self, seq: Sequence, in_flight: StepPlan | None, has_decoded: bool) -> int:
        """Counts the leading tokens of a running sequence that are now in the prefix cache.

        in_flight: the plan of this step, if it is complete; if not, has_decoded: whether the step decodes the
        sequence.
        """
        if seq.state is not DECODING:
            return seq.num_computed - seq.num_unread - self._pool.num_reprefillable_tokens
        if in_flight is not None:
            assert isinstance(in_flight.drafts, DraftPlan)
            has_decoded = seq in in_flight.drafts.seqs
        if self._pool.lookahead:  # the token of this step is known, but not the next one
            has_decoded = False
        num_known = self._drafting.num_readable(seq, has_decoded=has_decoded)
        return num_known - self._pool.num_reprefillable_tokens
