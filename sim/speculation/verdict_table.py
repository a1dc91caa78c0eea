"""The verdicts on the drafts of the sequences of a replica, as arrays by slot and output position."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from policies.core.sequence import Sequence
from policies.speculation import Proposer
from policies.speculation.engine.drafts import DraftPlan, Ints
from sim.speculation.acceptance import Acceptance


class VerdictTable:
    """Looks up what is accepted of the drafts of a plan, which does not depend on how a run is cut."""

    def __init__(self, acceptance: Acceptance, proposer: Proposer, seed: int, max_num_seqs: int) -> None:
        self._acceptance = acceptance
        self._proposer = proposer
        self._seed = seed
        self._accepted_SP: NDArray[np.uint8] = np.zeros((max_num_seqs, 256), np.uint8)
        self._proposed_SP: NDArray[np.uint8] | None = None  # None: every draft has all its tokens
        self._owners = [-1] * max_num_seqs  # request ids
        self._offset_S = np.zeros(max_num_seqs, np.int64)  # output position minus computed tokens
        self._known: SequenceOf[Sequence] = ()

    @property
    def varies(self) -> bool:
        """True if a draft may have fewer tokens than were asked for."""
        return self._proposed_SP is not None

    def find(self, seqs: SequenceOf[Sequence]) -> None:
        """Makes the verdicts of sequences that have none yet."""
        if seqs is self._known:
            return
        self._known = seqs
        owners = self._owners
        for seq in seqs:
            slot = seq.slot
            assert slot is not None
            if owners[slot] != seq.request_id:
                self._fill(slot, seq)

    def _fill(self, slot: int, seq: Sequence) -> None:
        """Stores the verdicts on the drafts of a sequence."""
        self._owners[slot] = seq.request_id
        self._offset_S[slot] = 1 - seq.num_prompt_tokens
        num_positions = seq._end_known - seq.num_prompt_tokens
        if num_positions + 1 > self._accepted_SP.shape[1]:
            self._widen(num_positions + 1)
        verdicts = self._acceptance.verdicts(seq.request, self._seed, num_positions, self._proposer)
        self._accepted_SP[slot, :num_positions] = verdicts.accepted
        self._accepted_SP[slot, num_positions:] = 0
        if verdicts.proposed is None:
            if self._proposed_SP is not None:
                self._proposed_SP[slot] = 255
            return
        if self._proposed_SP is None:
            self._proposed_SP = np.full_like(self._accepted_SP, 255)
        self._proposed_SP[slot, :num_positions] = verdicts.proposed
        self._proposed_SP[slot, num_positions:] = 0

    def _widen(self, num_positions: int) -> None:
        width = max(num_positions, 2 * self._accepted_SP.shape[1]) - self._accepted_SP.shape[1]
        self._accepted_SP = np.pad(self._accepted_SP, ((0, 0), (0, width)))
        if self._proposed_SP is not None:
            self._proposed_SP = np.pad(self._proposed_SP, ((0, 0), (0, width)))

    def accepted(self, drafts: DraftPlan, num_iterations: int) -> Ints:
        """Returns the accepted draft tokens [iterations, sequences] of a plan that is repeated."""
        self.find(drafts.seqs)
        slots, depth, table = drafts.slots, drafts.depth, self._accepted_SP
        position = drafts.num_computed + self._offset_S[slots]
        if num_iterations == 1:
            one: Ints = np.minimum(table[slots, position], depth)[np.newaxis]
            return one
        last = table.shape[1] - 1
        accepted = np.empty((num_iterations, len(slots)), np.int64)
        for row in accepted:
            np.minimum(table[slots, position], depth, out=row)
            position += row
            position += 1
            np.minimum(position, last, out=position)
        return accepted

    def proposed(self, drafts: DraftPlan, accepted: Ints) -> Ints | None:
        """Returns the draft tokens that are found for the next pass of each of drafts.next_seqs.

        accepted: of the last iteration, by sequence. None: as many as were asked for.
        """
        self.find(drafts.next_seqs)
        table = self._proposed_SP
        if table is None:
            return None
        slots = np.array([seq.slot for seq in drafts.next_seqs], np.int64)
        num_decodes = len(drafts.seqs)
        position = np.ones(len(slots), np.int64)
        position[:num_decodes] = drafts.num_computed + self._offset_S[drafts.slots] + accepted + 1
        for index, seq in enumerate(drafts.next_seqs[num_decodes:], num_decodes):
            position[index] = seq.num_output_tokens + 1  # also after a preemption
        position = np.minimum(position, table.shape[1] - 1)
        found: Ints = np.minimum(table[slots, position], drafts.next_drafts)
        return found
