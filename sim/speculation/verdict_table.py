"""The verdicts on the drafts of the sequences of a replica, as arrays by slot and output position."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from contextlib import suppress

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
        self._owner_S = np.full(max_num_seqs, -1, np.int64)  # request ids
        self._offset_S = np.zeros(max_num_seqs, np.int64)  # output position minus computed tokens
        self._num_positions = [0] * max_num_seqs
        self._known: SequenceOf[Sequence] = ()
        # The passes of a request that always has the same number of draft tokens, from some position on.
        self._place_SN = np.full((max_num_seqs, 128), -1, np.int64)  # output position before each pass
        self._next_S = np.zeros(max_num_seqs, np.int64)  # index of the next pass
        self._num_passes_S = np.zeros(max_num_seqs, np.int64)
        self._depth_S = np.zeros(max_num_seqs, np.int64)

    @property
    def varies(self) -> bool:
        """True if a draft may have fewer tokens than were asked for."""
        return self._proposed_SP is not None

    def find(self, drafts: DraftPlan) -> None:
        """Makes the verdicts on the sequences of a plan that have none yet."""
        if drafts.seqs is self._known:
            return
        self._known = drafts.seqs
        is_new = self._owner_S[drafts.slots] != drafts.ids
        if np.count_nonzero(is_new):
            for index in np.flatnonzero(is_new).tolist():
                self._fill(int(drafts.slots[index]), drafts.seqs[index])

    def _fill(self, slot: int, seq: Sequence) -> None:
        """Stores the verdicts on the drafts of a sequence."""
        self._owner_S[slot] = seq.request_id
        self._offset_S[slot] = 1 - seq.num_prompt_tokens
        self._num_positions[slot] = num_positions = seq._end_known - seq.num_prompt_tokens
        self._num_passes_S[slot] = 0
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
        """Returns the accepted draft tokens [iterations, sequences] of a plan that is repeated.

        num_iterations: the maximum; the result ends with the first iteration in which an answer ends.
        """
        self.find(drafts)
        slots, depth = drafts.slots, drafts.depth
        position = drafts.num_computed + self._offset_S[slots]
        if num_iterations == 1:
            one: Ints = np.minimum(self._accepted_SP[slots, position], depth)
            return one[np.newaxis]
        first = self._next_S[slots]
        is_known = (first < self._num_passes_S[slots]) & (self._depth_S[slots] == depth)
        is_known &= self._place_SN[slots, np.minimum(first, self._place_SN.shape[1] - 1)] == position
        if np.count_nonzero(is_known) < len(is_known):
            self._walk(slots[~is_known], position[~is_known], depth[~is_known])
            first = self._next_S[slots]
        num_left = int(np.minimum.reduce(self._num_passes_S[slots] - first))
        first = first + slots * self._place_SN.shape[1]
        passes = first + np.arange(min(num_iterations, num_left) + 1)[:, np.newaxis]
        places = self._place_SN.ravel().take(passes)
        accepted: Ints = places[1:] - places[:-1]
        accepted -= 1
        return accepted

    def _walk(self, slots: Ints, positions: Ints, depths: Ints) -> None:
        """Computes the passes of some slots up to the ends of their answers."""
        for slot, position, depth in zip(slots.tolist(), positions.tolist(), depths.tolist(), strict=True):
            num_positions = self._num_positions[slot]
            steps = np.minimum(self._accepted_SP[slot, :num_positions], depth)
            after = (steps + np.arange(1, num_positions + 1)).tolist()
            places = [position]
            with suppress(IndexError):  # from place to place, as `extend` reads what it has just appended
                places.extend(map(after.__getitem__, places))
            if len(places) == 1:  # the answer has ended: another pass, whose tokens are discarded
                places.append(position + 1)
            if len(places) > self._place_SN.shape[1]:
                width = max(len(places), 2 * self._place_SN.shape[1]) - self._place_SN.shape[1]
                self._place_SN = np.pad(self._place_SN, ((0, 0), (0, width)), constant_values=-1)
            self._place_SN[slot, : len(places)] = places
            self._next_S[slot] = 0
            self._num_passes_S[slot] = len(places) - 1
            self._depth_S[slot] = depth

    def ran(self, drafts: DraftPlan, num_iterations: int) -> None:
        """Notes that iterations of a plan have run."""
        self._next_S[drafts.slots] += num_iterations

    def proposed(self, drafts: DraftPlan, accepted: Ints) -> Ints | None:
        """Returns the draft tokens that are found for the next pass of each of drafts.next_seqs.

        accepted: of the last iteration, by sequence. None: as many as were asked for.
        """
        num_decodes = len(drafts.seqs)
        completed = drafts.next_seqs[num_decodes:]
        for seq in completed:
            slot = seq.slot
            assert slot is not None
            if self._owner_S[slot] != seq.request_id:
                self._fill(slot, seq)
        table = self._proposed_SP
        if table is None:
            return None
        slots = np.array([seq.slot for seq in drafts.next_seqs], np.int64)
        position = np.empty(len(slots), np.int64)
        position[:num_decodes] = drafts.num_computed + self._offset_S[drafts.slots] + accepted + 1
        position[num_decodes:] = [seq.num_output_tokens + 1 for seq in completed]  # also after a preemption
        position = np.minimum(position, table.shape[1] - 1)
        found: Ints = np.minimum(table[slots, position], drafts.next_drafts)
        return found
