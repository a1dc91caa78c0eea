"""The log of the draft tokens of a replica that speculates, as a part of the log of its iterations."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from struct import Struct
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from policies.core.sequence import Sequence
from policies.speculation.engine.drafts import DraftPlan, Ints
from sim.records.mapped_buffers import MappedBuffers
from sim.speculation.bursts import BurstLog
from sim.speculation.shapes import pairs_of

DRAFT_WORK_COLUMNS = ("draft_tokens", "draft_pairs", "draft_seqs", "draft_steps", "drafted_tokens")
"""Columns with the fields of `DraftWork`."""
DRAFT_COLUMNS = (
    *DRAFT_WORK_COLUMNS,
    *("proposed_tokens", "draft_passes", "verified_tokens", "accepted_tokens", "kept_tokens"),
)
"""Columns of the iteration table if an engine speculates: `DRAFT_WORK_COLUMNS`, then

    proposed_tokens  draft tokens that were made for the next passes; the proposer may find fewer than asked
    draft_passes     sequences with at least one draft token; without those that had ended before
    verified_tokens  their draft tokens
    accepted_tokens  those that were accepted
    kept_tokens      those that were accepted and precede the end of the answer
"""


_PLAN_COLUMNS: Final = (
    *("draft_tokens", "draft_seqs", "draft_steps", "drafted_tokens"),
    *("proposed_tokens", "draft_passes", "verified_tokens"),
)
"""Columns with the same number in all iterations of a plan."""
_PASS_COLUMNS: Final = (
    *("decode_context_tokens", "kv_blocks_used"),
    *("draft_pairs", "accepted_tokens", "kept_tokens"),
)
"""Columns with a number of their own in each iteration."""
_PACK_PASS: Final = Struct(f"={len(_PASS_COLUMNS)}q").pack
_PACK: Final = Struct(f"={1 + len(_PLAN_COLUMNS)}q").pack


class DraftLog:
    """The draft tokens of the iterations of one replica. first_iteration: see `BurstLog`."""

    def __init__(self, first_iteration: int) -> None:
        self.bursts = BurstLog(first_iteration)
        """Accepted draft tokens of each pass."""
        self._drafts = bytearray()  # per plan: iterations, `_PLAN_COLUMNS`
        self._passes = bytearray()  # per plan, for each of `_PASS_COLUMNS` one number per iteration
        self._buffers = MappedBuffers(self._drafts, self._passes)

    @property
    def num_bytes(self) -> int:
        """Memory of the log without its bursts, bytes."""
        return self._buffers.num_all_bytes()

    def add(
        self,
        drafts: DraftPlan,
        contexts: list[int],
        *,
        num_blocks: int,
        num_proposed: int | None,
        ended: Iterable[Sequence],
    ) -> None:
        """Logs iterations of a plan that are about to be committed.

        contexts: tokens that all decodes attend to in each. num_blocks: KV blocks in use in the first.
        num_proposed: draft tokens that were made for the next passes; None: as many as were asked for. ended:
        sequences that had ended before.
        """
        num_iterations, num_seqs, rows = len(contexts), len(drafts.seqs), drafts.num_drafts
        accepted, depth, sums = drafts.accepted, drafts.depth, drafts.sums[:num_iterations]
        assert accepted is not None
        accepted, totals = accepted[:num_iterations], drafts.totals[num_iterations - 1]
        surplus = None
        if np.count_nonzero(totals > drafts.end):  # behind the end of an answer
            surplus = np.maximum(totals - drafts.end, 0)
        num_judged, num_verified = num_seqs, num_seqs * (drafts.common or 0)
        if not drafts.common:
            num_judged, num_verified = int(np.count_nonzero(rows)), int(np.add.reduce(rows))
        places = _places_of(ended, drafts.slots)
        if places:
            num_judged -= int(np.count_nonzero(rows[places]))
            num_verified -= int(np.add.reduce(rows[places]))
            accepted, depth = accepted.copy(), depth.copy()
            accepted[:, places] = depth[places] = 0
            sums = np.add.reduce(accepted, axis=1).tolist()
            if surplus is not None:
                surplus[places] = 0
        num_surplus = 0 if surplus is None else int(np.add.reduce(surplus))
        self.bursts.add(drafts, depth, accepted, surplus if num_surplus else None)
        num_next, num_drafted = drafts.next_counts
        made = drafts.next_levels, num_drafted, num_drafted if num_proposed is None else num_proposed
        self._drafts += _PACK(num_iterations, drafts.num_tokens, num_next, *made, num_judged, num_verified)
        pairs = pairs_of(drafts, contexts)
        if num_iterations == 1:
            self._passes += _PACK_PASS(contexts[0], num_blocks, pairs[0], sums[0], sums[0] - num_surplus)
        else:
            blocks = [num_blocks + num_new for num_new in drafts.num_new_blocks[:num_iterations].tolist()]
            kept = [*sums[:-1], sums[-1] - num_surplus]
            self._passes += array("q", [*contexts, *blocks, *pairs, *sums, *kept]).tobytes()
        if len(self._drafts) >= self._buffers.limit:
            self._buffers.move()

    def fill(self, columns: dict[str, NDArray[Any]]) -> None:
        """Fills the columns of drafts, and corrects those that count them. The log is dropped."""
        found = self._columns_of_plans()
        for name in DRAFT_COLUMNS:
            columns[name][:] = found[name]
        columns["sampled_seqs"] += columns["draft_tokens"].astype(np.int32)
        grown = found["decode_context_tokens"] - columns["decode_context_tokens"]
        has_chunks = columns["prefill_seqs"] > 0
        columns["kv_tokens_used"] += np.where(has_chunks, 0, grown)
        columns["decode_context_tokens"] += grown
        num_blocks = columns["kv_blocks_used"]
        num_blocks[:] = np.where(has_chunks, num_blocks, found["kv_blocks_used"])

    def _columns_of_plans(self) -> dict[str, Ints]:
        """Returns the logged columns, one number per iteration."""
        plans = self._buffers.take(self._drafts, np.int64).reshape(-1, 1 + len(_PLAN_COLUMNS))
        passes = self._buffers.take(self._passes, np.int64)
        num = plans[:, 0]
        found = {
            name: np.repeat(column, num) for name, column in zip(_PLAN_COLUMNS, plans.T[1:], strict=True)
        }
        # The numbers of a row are in the order of _PASS_COLUMNS, of each one per iteration.
        num_columns = len(_PASS_COLUMNS)
        first = np.repeat((np.cumsum(num) - num) * num_columns, num)
        index = np.arange(len(first)) - np.repeat(np.cumsum(num) - num, num) + first
        for place, name in enumerate(_PASS_COLUMNS):
            found[name] = passes[index + np.repeat(num, num) * place]
        return found


def _places_of(ended: Iterable[Sequence], slots: Ints) -> list[int]:
    """Returns the places of ended sequences among those of a plan, which have slots [sequences]."""
    return [place for seq in ended for place in np.flatnonzero(slots == seq.slot).tolist()]
