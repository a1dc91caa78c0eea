"""Several iterations of one plan: how many there may be, and their KV blocks."""

from __future__ import annotations

import numpy as np

from policies.caching.pool import BlockPool
from policies.speculation.engine.draft_set import DraftSet
from policies.speculation.engine.drafts import DraftPlan, Ints
from policies.speculation.engine.step import DraftRows


def iterations_to_event(
    drafts: DraftPlan, accepted: Ints, decodes: DraftSet, rows: DraftRows, pool: BlockPool
) -> tuple[int, Ints]:
    """Returns what `Drafting.num_iterations_of` does, and notes totals and blocks in the drafts."""
    drafts.judge(accepted)
    num_iterations = len(accepted)
    if num_iterations == 1:
        return 1, drafts.num_new_blocks
    # Of one iteration to the next, no number decreases.
    totals = drafts.totals
    if np.count_nonzero(totals[-1] >= drafts.end):
        has_ended = np.logical_or.reduce(totals >= drafts.end, axis=1)
        num_iterations = int(np.argmax(has_ended)) + 1
    ends = decodes.bases(drafts, num_iterations)
    ends += drafts.reach
    has_room = None
    if not decodes.is_far:
        has_room = np.maximum.reduce(ends, axis=1) < decodes.max_model_len + decodes.num_lookahead
    drafts.num_blocks = num_blocks = rows.blocks_for(ends)
    held: Ints = decodes.blocks_S[drafts.slots]
    np.maximum(num_blocks, held, out=num_blocks)
    used = np.add.reduce(num_blocks, axis=1)
    used -= np.add.reduce(held)
    if used[-1] > (num_free := pool.num_free_without_copy):
        has_room = used <= num_free if has_room is None else has_room & (used <= num_free)
    if has_room is not None and not has_room[-1]:
        num_iterations = max(int(np.argmin(has_room)), 1)
    drafts.num_new_blocks = used[:num_iterations]
    return num_iterations, drafts.num_new_blocks


class Reservation:
    """Remembers the blocks that the sequences of a plan had, before they got those of the worst case."""

    def __init__(self, drafts: DraftPlan, decodes: DraftSet, rows: DraftRows, pool: BlockPool) -> None:
        self._decodes = decodes
        self._rows = rows
        self._pool = pool
        self._before: Ints = decodes.blocks_S[drafts.slots]

    def settle(self, drafts: DraftPlan, num_iterations: int) -> None:
        """Frees the blocks that were not needed for what iterations have accepted.

        Afterwards the sequences have the blocks that as many single steps would have given them.
        """
        decodes, slots = self._decodes, drafts.slots
        reserved: Ints = decodes.blocks_S[slots]
        decodes.blocks_S[slots] = self._before
        last = decodes.bases(drafts, num_iterations)[-1]
        needed = np.maximum(self._rows.blocks_for(last + drafts.reach), self._before)
        decodes.blocks_S[slots] = needed
        surplus = reserved - needed
        for index in np.flatnonzero(surplus).tolist():
            self._pool.give_back(drafts.seqs[index], int(needed[index]), int(surplus[index]))
