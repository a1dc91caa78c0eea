"""Several iterations of one plan: how many there may be, and their KV blocks."""

from __future__ import annotations

import numpy as np

from policies.caching.pool import BlockPool
from policies.speculation.engine.draft_set import DraftSet
from policies.speculation.engine.drafts import DraftPlan, Ints
from policies.speculation.engine.step import DraftStep


def iterations_to_event(
    drafts: DraftPlan, accepted: Ints, decodes: DraftSet, step: DraftStep, pool: BlockPool
) -> tuple[int, Ints]:
    """Returns what `Drafting.num_iterations_of` does, and notes totals and blocks in the drafts."""
    if len(accepted) == 1:
        return 1, drafts.num_new_blocks
    drafts.totals = totals = decodes.totals(drafts, accepted)
    base = decodes.bases(drafts, totals)
    drafts.num_blocks = num_blocks = step.blocks_of(drafts, base)
    used = np.add.reduce(num_blocks, axis=1)
    used -= int(np.add.reduce(decodes.blocks_S[drafts.slots]))
    num_free, num_iterations, num_rows = pool.num_free_without_copy, len(accepted), drafts.num_drafts + 1
    # Of one iteration to the next, no number decreases.
    if used[-1] > num_free or np.maximum.reduce(base[-1] + num_rows) >= decodes.max_model_len:
        has_room = used <= num_free
        has_room &= np.maximum.reduce(base + num_rows, axis=1) < decodes.max_model_len
        num_iterations = max(int(np.argmin(has_room)), 1)
    if np.count_nonzero(totals[num_iterations - 1] >= drafts.end):
        has_ended = np.logical_or.reduce(totals[:num_iterations] >= drafts.end, axis=1)
        num_iterations = int(np.argmax(has_ended)) + 1
    drafts.num_new_blocks = used[:num_iterations]
    return num_iterations, drafts.num_new_blocks


class Reservation:
    """Remembers the blocks that the sequences of a plan had, before they got those of the worst case."""

    def __init__(self, drafts: DraftPlan, decodes: DraftSet, step: DraftStep, pool: BlockPool) -> None:
        self._decodes = decodes
        self._step = step
        self._pool = pool
        self._before: Ints = decodes.blocks_S[drafts.slots]

    def settle(self, drafts: DraftPlan, accepted: Ints) -> None:
        """Frees the blocks that accepted [iterations, sequences] draft tokens did not need.

        Afterwards the sequences have the blocks that as many single steps would have given them.
        """
        decodes, slots = self._decodes, drafts.slots
        reserved: Ints = decodes.blocks_S[slots]
        decodes.blocks_S[slots] = self._before
        base = decodes.bases(drafts, decodes.totals(drafts, accepted))
        needed = self._step.blocks_of(drafts, base)[-1]
        decodes.blocks_S[slots] = needed
        surplus = reserved - needed
        for index in np.flatnonzero(surplus).tolist():
            self._pool.give_back(drafts.seqs[index], int(needed[index]), int(surplus[index]))
