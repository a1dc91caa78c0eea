"""The decoding sequences of an engine that speculates: each advances by 1 to K + 1 tokens in an iteration.

They have no common clock. Arrays by slot hold the data that every pass reads and writes, so a pass takes
about the same time for one sequence as for a hundred.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from operator import attrgetter

import numpy as np

from policies.caching.pool import BlockPool
from policies.core.decode_set import DecodeSet
from policies.core.plan import StepPlan
from policies.core.sequence import (
    DECODING,
    ENDED,
    LOADING,
    PAGED,
    PAUSED,
    PREFILLING,
    WAITING,
    Growth,
    Sequence,
    SequenceState,
)
from policies.speculation.engine.drafts import DraftPlan, Ints

_ADMISSION = attrgetter("admission")


class SlotClock:
    """The number of computed tokens of one slot, used as the clock of its sequence."""

    __slots__ = ("_decodes", "_slot")

    def __init__(self, decodes: DraftSet, slot: int) -> None:
        self._decodes = decodes
        self._slot = slot

    @property
    def clock(self) -> int:
        """Number of computed tokens."""
        return self._decodes.num_shown(self._slot)


class DraftSet(DecodeSet):
    """The decoding sequences, with their counts by slot.

    reads_late: whether the tokens of a step are read only when the next step is planned (see drafting.py). If
    so, the scheduler counts all rows of the step in flight as computed tokens.
    """

    holds_planned = True

    def __init__(self, max_num_seqs: int, pool: BlockPool, max_model_len: int) -> None:
        super().__init__(max_num_seqs, pool.block_size, {})
        self.max_slots = min(max_model_len, pool.max_tokens_per_seq)
        """Maximum KV slots of a sequence."""
        self.max_model_len = min(max_model_len, pool.max_tokens_per_seq + 1)
        """Maximum known tokens of a sequence; the newest one needs no slot."""
        self.margin = 0
        """Upper bound of the slots that a sequence may take beyond the end of its output."""
        self.num_lookahead = 0
        """KV slots that the proposer needs after those of a pass."""
        self.reads_late = False
        self.caches_verified = False
        """Whether accepted draft tokens enter the prefix cache as soon as they are verified; see `Release`.
        """
        self.is_read = False
        """Whether the tokens of the step in flight have been read, while its ended members leave."""
        self._pool = pool
        self.computed_S = np.zeros(max_num_seqs, np.int64)
        """Number of computed tokens, by slot."""
        self.base_S = np.zeros(max_num_seqs, np.int64)
        """Computed tokens as the scheduler counts them."""
        self.blocks_S = np.zeros(max_num_seqs, np.int64)
        """KV blocks that the sequence holds, including those of rejected draft tokens."""
        self.drafts_S = np.zeros(max_num_seqs, np.int64)
        """Draft tokens for the next pass."""
        self.last_S = np.zeros(max_num_seqs, np.int64)
        """Tokens of the last pass, until the scheduler has read them; see `leave`."""
        self._is_covered = pool.lookahead > 0  # whether the content of a block includes the token after it
        self._num_told = 0  # see `tell`
        self._told_S = np.zeros(max_num_seqs, np.int64)  # minimum number of tokens in the prefix cache
        self.end_S = np.zeros(max_num_seqs, np.int64)
        """Computed tokens with which the sequence ends."""
        self.ids_S = np.zeros(max_num_seqs, np.int64)
        """Request ids."""
        self.num_changes = 0
        """Number of times that a member has joined or left."""
        self.is_member_S = np.zeros(max_num_seqs, bool)
        """Whether the slot is that of a member."""
        self.num_unread = 0
        """Kept accepted draft tokens of the last pass, of all members; see `hide`."""
        self.is_hiding = False
        """Whether these are excluded from the counts."""
        self._left_hidden: list[tuple[Sequence, int, int]] = []  # members that left, with their tokens
        self.is_far = True
        """Whether no member can come near the end of the model's context, so no limit needs checking."""
        self._one = np.ones(1, np.int64)  # an array, because numpy adds Python numbers more slowly
        self._may_idle = False  # whether a member may have had all its tokens read
        self._admitted: list[Sequence] = []  # the members in the order of their admission
        self._admitted_slots = array("q")
        self._members: list[Sequence] = []  # of the time of `_listed`
        self._slots = np.zeros(0, np.int64)
        self._listed = 0  # number of changes then

    def limit_slots(self, max_slots: int) -> None:
        """Limits the KV slots of a sequence, whose rank may have less memory than the engine."""
        self.max_slots = min(self.max_slots, max_slots)
        self.max_model_len = min(self.max_model_len, max_slots + 1)

    def __contains__(self, seq: object) -> bool:
        return isinstance(seq, Sequence) and seq.state is DECODING and bool(self.is_member_S[seq.slot])

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.members)

    @property
    def members(self) -> list[Sequence]:
        """The members in the order of their admission; not to be changed."""
        if self._listed != self.num_changes:
            self._list_members()
        return self._members

    @property
    def slots(self) -> Ints:
        """Slots of the members, in the same order; not to be changed."""
        if self._listed != self.num_changes:
            self._list_members()
        return self._slots

    def _list_members(self) -> None:
        """Rebuilds the lists of members and slots after one has joined or left."""
        self._listed = self.num_changes
        self._members = self._admitted.copy()
        self._slots = np.array(self._admitted_slots)

    @property
    def num_computed_S(self) -> Ints:
        """Computed tokens by slot [max_num_seqs]; 0 where no sequence decodes. A new array."""
        return np.where(self.is_member_S, self.computed_S, 0)

    def num_shown(self, slot: int) -> int:
        """Returns the computed tokens of a member, excluding its last pass while that is hidden."""
        num_computed = self.computed_S.item(slot)
        if self.is_hiding and (num_last := self.last_S.item(slot)):
            num_computed -= num_last - 1
        return num_computed

    def join(self, seq: Sequence, growth: Growth = PAGED) -> None:
        """Adds a sequence that holds a slot and has computed all its known tokens except the newest."""
        if growth is not PAGED:
            raise ValueError(
                "speculation: this cache reserves or drops KV, so it cannot hold draft tokens; "
                "choose caching=paged, prefix, radix or tiered"
            )
        slot, num_computed = seq.slot, seq.stored_computed
        assert slot is not None
        was_paused, is_new = seq.state is PAUSED, seq.state is PREFILLING or seq.state is LOADING
        seq.clock_source = SlotClock(self, slot)
        seq.origin = 0
        seq.state = DECODING
        seq.growth = growth
        self.computed_S[slot] = self.base_S[slot] = num_computed
        self.expect_end(seq)
        self.ids_S[slot] = seq.request_id
        if was_paused:
            self._may_idle = True
        else:
            self.last_S[slot] = int(self.reads_late)  # its first token
            self._told_S[slot] = num_computed - self._is_covered
        if is_new:
            self.drafts_S[slot] = 0
        self.blocks_S[slot] = self._pool.blocks_for(num_computed) + seq.num_extra_blocks
        self._pool.num_extra_blocks -= seq.num_extra_blocks
        seq.num_extra_blocks = 0
        self.is_member_S[slot] = True
        place = bisect_left(self._admitted, seq.admission, key=_ADMISSION)
        self._admitted.insert(place, seq)
        self._admitted_slots.insert(place, slot)
        self.num_changes += 1
        self.size += 1
        self.num_context_tokens += num_computed

    def stay(self, seq: Sequence) -> None:
        """Keeps a member that has just ended for one more pass, whose tokens are discarded."""
        seq._end_known += 1
        self.expect_end(seq)

    def expect_end(self, seq: Sequence) -> None:
        """Sets the end of a member."""
        self.end_S[seq.slot] = end = seq._end_known - 1
        if end + self.margin >= self.max_slots:
            self.is_far = False

    def leave(self, seq: Sequence, state: SequenceState) -> None:
        """Removes a member; its token counts are written back to it, and its state becomes `state`.

        Its blocks after those of its computed tokens become extra blocks. seq.num_unread becomes the number
        of its last tokens that are not in the prefix cache. With asynchronous scheduling these are all tokens
        of the step in flight; otherwise the tokens after the first one of the last pass, which only the next
        plan would have offered.
        """
        slot = seq.slot
        assert slot is not None
        seq.stored_computed = num_computed = self.num_shown(slot)
        if self.num_unread and (num_unread := max(self.last_S.item(slot) - 1, 0)):
            self.num_unread -= num_unread
            if self.is_hiding:
                self._left_hidden.append((seq, slot, num_unread))
                self.computed_S[slot] = num_computed
                self.last_S[slot] = 1
        seq.stored_known = num_computed + 1
        seq.state = state
        num_readable = self.num_readable(seq, has_decoded=False)
        if self._num_told:  # the token that will not be computed counts if the last tokens are excluded
            num_readable = min(self._num_told, num_computed + (self._pool.num_reprefillable_tokens > 0))
            self._num_told = 0
        seq.num_unread = 0 if self.is_read else num_computed - num_readable
        seq.num_extra_blocks = int(self.blocks_S[slot]) - self._pool.blocks_for(num_computed)
        self._pool.num_extra_blocks += seq.num_extra_blocks
        self.is_member_S[slot] = False
        place = bisect_left(self._admitted, seq.admission, key=_ADMISSION)
        del self._admitted[place], self._admitted_slots[place]
        self.num_changes += 1
        self.size -= 1
        self.num_context_tokens -= num_computed
        if state is WAITING:
            self.drafts_S[slot] = 0
        if not self.size:
            self.is_far = True

    def needs_block(self, seq: Sequence) -> bool:
        """Returns whether the next pass of a member needs a KV block that the member does not hold."""
        slot = seq.slot
        num_slots = int(self.base_S[slot] + self.drafts_S[slot]) + 1 + self.num_lookahead
        return min(num_slots, self.max_slots) > int(self.blocks_S[slot]) * self.block_size

    def num_pooled(self, seq: Sequence) -> int:
        """Counts the tokens for which the pool counts blocks as a member's own."""
        return int(self.blocks_S[seq.slot]) * self.block_size

    def num_certain(self, seq: Sequence) -> int:
        """Returns the known tokens of a member without those of its last pass after the first."""
        return int(self.computed_S[seq.slot]) + 1 - max(int(self.last_S[seq.slot]) - 1, 0)

    def num_readable(self, seq: Sequence, *, has_decoded: bool) -> int:
        """Counts the leading tokens of a member in the prefix cache.

        has_decoded: whether the step being planned, or just planned, decodes it.
        """
        num_computed, num_last = int(self.computed_S[seq.slot]), int(self.last_S[seq.slot])
        if self.reads_late:
            return max(num_computed - num_last + has_decoded, int(self._told_S[seq.slot]))
        if has_decoded or self.caches_verified:
            return num_computed + has_decoded
        return num_computed - max(num_last - 1, 0)

    def tell(self, seq: Sequence) -> None:
        """Records that the step being planned has offered all tokens of a member to the prefix cache.

        The next call must be `leave` of this member: the step has decoded it, and now preempts it.
        """
        self._num_told = self.num_readable(seq, has_decoded=not self._is_covered)

    def advance_by(self, drafts: DraftPlan, num_iterations: int) -> list[Sequence]:
        """Advances the sequences of a plan by the accepted tokens and one more token per iteration.

        Returns the sequences that end. With several iterations, no sequence may end before the last one.
        """
        slots, totals, num_seqs = drafts.slots, drafts.totals, len(drafts.seqs)
        after = totals[num_iterations - 1]
        before = drafts.num_computed if num_iterations == 1 else totals[num_iterations - 2]
        certain: Ints = before + self._one
        num_kept = int(drafts.sums[num_iterations - 1]) - num_seqs
        num_new = num_kept + num_seqs
        if num_iterations > 1:
            num_new = int(np.add.reduce(drafts.sums[:num_iterations]))
        has_ended = after >= drafts.end
        if drafts.num_changes != self.num_changes:
            is_member = self.is_member_S[slots]
            if np.count_nonzero(is_member) < num_seqs:  # the others had ended before this step
                has_ended &= is_member
                for index in (~is_member).nonzero()[0].tolist():
                    num_seqs -= 1
                    num_kept -= int(after[index] - certain[index])
                    num_new -= int(after[index] - drafts.num_computed[index])
        ended: list[Sequence] = []
        if np.count_nonzero(has_ended):
            indices = has_ended.nonzero()[0]
            num_surplus = int(np.add.reduce(after[indices] - drafts.end[indices]))
            num_kept -= num_surplus
            num_new -= num_surplus
            after = np.minimum(after, drafts.end)
            ended = [drafts.seqs[index] for index in indices.tolist()]
        self.num_context_tokens += num_new
        num_last = after - certain
        num_last += self._one
        self.computed_S[slots] = after
        if not self.reads_late:
            self.base_S[slots] = after
            self.last_S[slots] = num_last
            return ended
        if self._may_idle:
            idle = self.last_S[slots] == 0  # all their tokens had been read when this step was planned
            if np.count_nonzero(idle):
                self._told_S[slots[idle]] = drafts.num_computed[idle] + 1 - self._is_covered
        self._may_idle = num_seqs != self.size
        if self._may_idle:
            self.base_S[self.slots] = self.computed_S[self.slots]
        self.base_S[slots] = certain + drafts.num_drafts
        self.last_S[:] = 0
        self.last_S[slots] = num_last
        self.num_unread = num_kept
        return ended

    def hide(self) -> None:
        """Excludes the accepted draft tokens of the last pass from the counts while a step is planned.

        The executor of that pass may not know them yet: it may read them while the next step runs.
        """
        if self.is_hiding or not self.num_unread:
            return
        self.is_hiding = True
        self.num_context_tokens -= self.num_unread

    def show(self, in_flight: StepPlan | None) -> None:
        """Adds the draft tokens excluded by `hide` back to the counts, and to the new plan."""
        num_unread, self.num_unread = self.num_unread, 0
        if not self.is_hiding:
            return
        self.is_hiding = False
        self.num_context_tokens += num_unread
        left, self._left_hidden = self._left_hidden, []
        for seq, slot, num_hidden in left:
            if seq.state is DECODING and seq.slot == slot:  # it has joined again
                self.computed_S[slot] += num_hidden
                self.last_S[slot] += num_hidden
                self.num_context_tokens += num_hidden
            else:
                self._add_to_former(seq, num_hidden)
        if in_flight is not None:
            self.update(in_flight)

    def add_kept(self, drafts: DraftPlan, num_kept: Ints) -> None:
        """Adds accepted draft tokens of the last pass to the counts of its sequences, which may have left."""
        is_member = self.is_member_S[drafts.slots]  # no other sequence has joined with a slot of these
        if np.count_nonzero(is_member) == len(is_member):
            self._add_last(drafts.slots, num_kept)
            return
        self._add_last(drafts.slots[is_member], num_kept[is_member])
        for index in np.flatnonzero(~is_member).tolist():
            if num_kept[index]:
                self._add_to_former(drafts.seqs[index], int(num_kept[index]))

    def update(self, plan: StepPlan) -> None:
        """Sets the numbers of a plan in flight that follow from the computed tokens of its sequences."""
        drafts = plan.drafts
        assert isinstance(drafts, DraftPlan)
        drafts.num_computed = self.computed_S[drafts.slots]
        drafts.end = self.end_S[drafts.slots]
        plan.num_decode_context_tokens = self.num_tokens_of(drafts) + len(drafts.seqs)

    def num_tokens_of(self, drafts: DraftPlan) -> int:
        """Sums the computed tokens of the sequences of a plan."""
        if len(drafts.seqs) == self.size:
            return self.num_context_tokens
        num_tokens = int(np.add.reduce(drafts.num_computed))
        if self.is_hiding:
            num_tokens -= int(np.add.reduce(np.maximum(self.last_S[drafts.slots] - 1, 0)))
        return num_tokens

    def _add_last(self, slots: Ints, num_tokens: Ints) -> None:
        """Adds tokens to the last pass of members."""
        self.computed_S[slots] += num_tokens
        self.last_S[slots] += num_tokens
        self.num_context_tokens += int(np.add.reduce(num_tokens))

    def _add_to_former(self, seq: Sequence, num_tokens: int) -> None:
        """Adds tokens to the last pass of a sequence that has left; its blocks have room for them."""
        if seq.state is ENDED:
            return
        seq.stored_known += num_tokens
        if seq.state is WAITING:
            seq.num_lost += num_tokens
            return
        pool = self._pool
        num_held = pool.blocks_for(seq.stored_computed) + seq.num_extra_blocks
        seq.stored_computed += num_tokens
        seq.num_unread += num_tokens
        pool.num_extra_blocks -= seq.num_extra_blocks
        seq.num_extra_blocks = num_held - pool.blocks_for(seq.stored_computed)
        pool.num_extra_blocks += seq.num_extra_blocks

    def rest(self) -> None:
        """Records a step in which no member decodes: the previous step's tokens have been read."""
        if self.reads_late:
            self.last_S[:] = 0
            self.base_S[:] = self.computed_S
            self._may_idle = True

    def bases(self, drafts: DraftPlan, num_iterations: int) -> Ints:
        """Computes the tokens [iterations, sequences] that the scheduler counts before each iteration."""
        totals = drafts.totals
        base = np.empty((num_iterations, len(drafts.seqs)), np.int64)
        base[0] = drafts.base
        if not self.reads_late:
            base[1:] = totals[: num_iterations - 1]
        elif num_iterations > 1:
            num_rows = drafts.num_drafts + self._one
            np.add(drafts.num_computed, num_rows, out=base[1])
            np.add(totals[: num_iterations - 2], num_rows, out=base[2:])
        return base
