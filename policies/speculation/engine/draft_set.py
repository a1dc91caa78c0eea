"""The decoding sequences of an engine that speculates: each advances by 1 to K + 1 tokens in an iteration.

They have no common clock. Arrays by slot hold what every pass reads and writes, so that a pass costs about
the same for one sequence as for a hundred.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from policies.caching.pool import BlockPool
from policies.core.decode_set import DecodeSet
from policies.core.growth import PAGED, Growth
from policies.core.plan import StepPlan
from policies.core.sequence import DECODING, ENDED, PAUSED, WAITING, Sequence, SequenceState
from policies.speculation.engine.drafts import DraftPlan, Ints

_ADMISSION = attrgetter("admission")


class Unread(NamedTuple):
    """The last pass of members, of which the scheduler has not read the accepted draft tokens.

    certain, after, num_last [sequences]: computed tokens without and with these tokens, and tokens of the
    pass. num_kept: accepted draft tokens that stay, summed. num_changes: `DraftSet.num_changes` at the pass;
    -1: members have joined or left before the tokens were hidden.
    """

    drafts: DraftPlan
    certain: Ints
    after: Ints
    num_last: Ints
    num_kept: int
    num_changes: int


class SlotClock:
    """The number of computed tokens of one slot, read as the clock of its sequence."""

    __slots__ = ("_num_computed_S", "_slot")

    def __init__(self, num_computed_S: Ints, slot: int) -> None:
        self._num_computed_S = num_computed_S
        self._slot = slot

    @property
    def clock(self) -> int:
        """Number of computed tokens."""
        return int(self._num_computed_S[self._slot])


class DraftSet(DecodeSet):
    """The decoding sequences, with their counts by slot.

    reads_late: whether the tokens of a step are read when the next one is planned (see drafting.py). Then the
    scheduler counts all rows of the step in flight as computed tokens.
    """

    def __init__(
        self, max_num_seqs: int, pool: BlockPool, running: Mapping[int, Sequence], max_model_len: int
    ) -> None:
        super().__init__(max_num_seqs, pool.block_size, running)
        self.max_slots = min(max_model_len, pool.max_tokens_per_seq)
        """Maximum KV slots of a sequence."""
        self.max_model_len = min(max_model_len, pool.max_tokens_per_seq + 1)
        """Maximum known tokens of a sequence, the newest of which needs no slot."""
        self.num_lookahead = 0
        """KV slots behind those of a pass that the proposer needs."""
        self.reads_late = False
        self.is_read = False
        """Whether the tokens of the step in flight have been read, while members leave that it has ended."""
        self._pool = pool
        self.computed_S = np.zeros(max_num_seqs, np.int64)
        """Number of computed tokens, by slot."""
        self.base_S = np.zeros(max_num_seqs, np.int64)
        """Computed tokens as the scheduler counts them."""
        self.blocks_S = np.zeros(max_num_seqs, np.int64)
        """KV blocks that the sequence holds, those of rejected draft tokens included."""
        self.drafts_S = np.zeros(max_num_seqs, np.int64)
        """Draft tokens for the next pass."""
        self.last_S = np.zeros(max_num_seqs, np.int64)
        """Tokens of the last pass, until the scheduler has read them; see `leave`."""
        self._num_told = 0  # see `tell`
        self._told_S = np.zeros(max_num_seqs, np.int64)  # tokens that a prefix cache knows at least
        self.end_S = np.zeros(max_num_seqs, np.int64)
        """Computed tokens with which the sequence ends."""
        self.ids_S = np.zeros(max_num_seqs, np.int64)
        """Request ids."""
        self.num_changes = 0
        """How often a member has joined or left."""
        self.is_member_S = np.zeros(max_num_seqs, bool)
        """Whether the slot is that of a member."""
        self.unread: Unread | None = None
        """The last pass, until the next plan is made; see `hide`."""
        self._may_idle = False  # whether there may be a member whose tokens had all been read
        self._admitted: list[Sequence] = []  # the members in the order of their admission
        self._admitted_slots = array("q")
        self._members: list[Sequence] = []  # of the time of `_listed`
        self._slots = np.zeros(0, np.int64)
        self._listed = 0  # number of changes then

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
        """Lists the members and their slots anew, after one has joined or left."""
        self._listed = self.num_changes
        self._members = self._admitted.copy()
        self._slots = np.array(self._admitted_slots)

    @property
    def num_computed_S(self) -> Ints:
        """Computed tokens by slot [max_num_seqs]; 0 where no sequence decodes. A new array."""
        return np.where(self.is_member_S, self.computed_S, 0)

    def admit(self, seq: Sequence) -> None:
        """Clears the counts of the slot of a sequence that has just been admitted."""
        self.drafts_S[seq.slot] = self.last_S[seq.slot] = 0

    def join(self, seq: Sequence, growth: Growth = PAGED) -> None:
        """Adds a sequence that holds a slot and has computed all its known tokens except the newest."""
        if growth is not PAGED:
            raise ValueError(
                "speculation: this cache reserves or drops KV, so it cannot hold draft tokens; "
                "choose caching=paged, prefix, radix or tiered"
            )
        slot, num_computed = seq.slot, seq.stored_computed
        assert slot is not None
        was_paused = seq.state is PAUSED
        seq.clock_source = SlotClock(self.computed_S, slot)
        seq.origin = 0
        seq.state = DECODING
        seq.growth = growth
        self.computed_S[slot] = self.base_S[slot] = num_computed
        self.end_S[slot] = seq._end_known - 1
        self.ids_S[slot] = seq.request_id
        if was_paused:
            self._may_idle = True
        else:
            self.last_S[slot] = int(self.reads_late)  # its first token
            self._told_S[slot] = num_computed
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
        self.end_S[seq.slot] += 1

    def expect_end(self, seq: Sequence) -> None:
        """Sets the end of a member."""
        self.end_S[seq.slot] = seq._end_known - 1

    def leave(self, seq: Sequence, state: SequenceState) -> None:
        """Removes a member; its token counts are written back to it, and its state becomes `state`.

        Its blocks after those of its computed tokens become extra blocks. seq.num_unread becomes the number
        of its last tokens that a prefix cache does not know: asynchronously all of the step in flight, else
        those after the first of the last pass, which only the next plan would have offered.
        """
        slot = seq.slot
        assert slot is not None
        seq.stored_computed = num_computed = int(self.computed_S[slot])
        seq.stored_known = num_computed + 1
        seq.state = state
        num_readable = self.num_readable(seq, has_decoded=False)
        if self._num_told:  # the token that will not be computed counts where the last tokens are left out
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

    def needs_block(self, seq: Sequence) -> bool:
        """Returns whether the next pass of a member needs a KV block that the member does not hold."""
        slot = seq.slot
        num_slots = int(self.base_S[slot] + self.drafts_S[slot]) + 1 + self.num_lookahead
        return min(num_slots, self.max_slots) > int(self.blocks_S[slot]) * self.block_size

    def num_certain(self, seq: Sequence) -> int:
        """Returns the known tokens of a member without those of its last pass after the first."""
        return int(self.computed_S[seq.slot]) + 1 - max(int(self.last_S[seq.slot]) - 1, 0)

    def num_readable(self, seq: Sequence, *, has_decoded: bool) -> int:
        """Counts the first tokens of a member that a prefix cache knows.

        has_decoded: whether the step that is being planned, or is planned, decodes it.
        """
        num_computed, num_last = int(self.computed_S[seq.slot]), int(self.last_S[seq.slot])
        if self.reads_late:
            return max(num_computed - num_last + has_decoded, int(self._told_S[seq.slot]))
        return num_computed + 1 if has_decoded else num_computed - max(num_last - 1, 0)

    def tell(self, seq: Sequence) -> None:
        """Records that the step that is being planned has told a prefix cache all tokens of a member.

        The next call must be `leave` of this member: the step has decoded it, and now preempts it.
        """
        self._num_told = self.num_readable(seq, has_decoded=True)

    def totals(self, drafts: DraftPlan, accepted: Ints) -> Ints:
        """Computes the computed tokens [iterations, sequences] after each iteration, without ends."""
        totals: Ints = np.add.accumulate(accepted + 1, axis=0)
        totals += drafts.num_computed
        return totals

    def advance_by(self, drafts: DraftPlan, accepted: Ints) -> list[Sequence]:
        """Advances the sequences of a plan by accepted [iterations, sequences] draft tokens and one each.

        Returns the sequences that end; those after the first iteration must not end before the last one.
        """
        slots, last = drafts.slots, accepted[-1]
        certain: Ints = drafts.num_computed + len(accepted)
        if len(accepted) > 1:
            certain += np.add.reduce(accepted[:-1], axis=0)
        after: Ints = certain + last
        has_ended = after >= drafts.end
        ended: list[Sequence] = []
        if np.count_nonzero(has_ended):
            after = np.minimum(after, drafts.end)
            ended = [drafts.seqs[index] for index in np.flatnonzero(has_ended).tolist()]
        decode_all = len(slots) == self.size
        before = self.num_context_tokens if decode_all else int(np.add.reduce(drafts.num_computed))
        num_after = int(np.add.reduce(after))
        self.num_context_tokens += num_after - before
        self.computed_S[slots] = after
        if not self.reads_late:
            self.base_S[slots] = after
            self.last_S[slots] = last + 1 if not ended else after - certain + 1
            return ended
        if self._may_idle:
            idle = self.last_S[slots] == 0  # all their tokens had been read when this step was planned
            if np.count_nonzero(idle):
                self._told_S[slots[idle]] = drafts.num_computed[idle] + 1
        self.last_S[:] = 0
        self._may_idle = not decode_all
        if not decode_all:
            self.base_S[self.slots] = self.computed_S[self.slots]
        self.base_S[slots] = certain + drafts.num_drafts
        num_last = after - certain
        num_last += 1
        self.last_S[slots] = num_last
        before_last = before + len(slots) if len(accepted) == 1 else int(np.add.reduce(certain))
        self.unread = Unread(drafts, certain, after, num_last, num_after - before_last, self.num_changes)
        return ended

    def hide(self) -> None:
        """Takes the draft tokens that the last pass accepted out of the counts while a step is planned.

        The executor of that pass may not know them yet: it may read them while the next step runs.
        """
        unread = self.unread
        if unread is None:
            return
        if unread.num_changes == self.num_changes:
            slots = unread.drafts.slots
            self.computed_S[slots] = unread.certain
            self.last_S[slots] = 1
            self.num_context_tokens -= unread.num_kept
            return
        drafts, num_last = unread.drafts, unread.num_last
        is_member = self.is_member_S[drafts.slots]
        if np.count_nonzero(is_member) < len(is_member):  # others were aborted since, or are at their limit
            drafts, num_last = drafts.part(is_member), num_last[is_member]
        num_kept = int(np.add.reduce(num_last)) - len(num_last)
        self.unread = unread._replace(drafts=drafts, num_last=num_last, num_kept=num_kept, num_changes=-1)
        self._add_last(drafts.slots, 1 - num_last)

    def show(self, in_flight: StepPlan | None) -> None:
        """Adds the draft tokens that `hide` has taken out to the counts, and to the plan that was made."""
        unread, self.unread = self.unread, None
        if unread is None or not unread.num_kept:
            return
        if unread.num_changes == self.num_changes:
            slots = unread.drafts.slots
            self.computed_S[slots] = unread.after
            self.last_S[slots] = unread.num_last
            self.num_context_tokens += unread.num_kept
        else:
            self.add_kept(unread.drafts, unread.num_last - 1)
        if in_flight is not None:
            self.update(in_flight)

    def add_kept(self, drafts: DraftPlan, num_kept: Ints) -> None:
        """Adds accepted draft tokens of the last pass to the counts of its sequences, which may have left."""
        is_member = self.is_member_S[drafts.slots]  # no other sequence has joined with the slot of one
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
        drafts.num_computed = num_computed = self.computed_S[drafts.slots]
        drafts.end = self.end_S[drafts.slots]
        plan.num_decode_context_tokens = self.num_tokens_of(num_computed) + len(drafts.seqs)

    def num_tokens_of(self, num_computed: Ints) -> int:
        """Sums the computed tokens of members [sequences], each of them once."""
        if len(num_computed) == self.size:
            return self.num_context_tokens
        return int(np.add.reduce(num_computed))

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
        """Records a step in which no member decodes: the tokens of the step before have been read."""
        if self.reads_late:
            self.last_S[:] = 0
            self.base_S[:] = self.computed_S
            self._may_idle = True

    def bases(self, drafts: DraftPlan, totals: Ints) -> Ints:
        """Computes the tokens that the scheduler counts as computed before each iteration.

        totals: computed tokens after each iteration. Both [iterations, sequences].
        """
        base = np.empty_like(totals)
        base[0] = drafts.base
        if not self.reads_late:
            base[1:] = totals[:-1]
        elif len(base) > 1:
            num_rows = drafts.num_drafts + 1
            np.add(drafts.num_computed, num_rows, out=base[1])
            np.add(totals[:-2], num_rows, out=base[2:])
        return base
