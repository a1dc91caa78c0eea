"""The log of the draft tokens of a replica that speculates, as a part of the log of its iterations."""

from __future__ import annotations

from array import array
from collections.abc import Collection
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
_PLAN: Final = ("iterations", *_PLAN_COLUMNS, "common", "lost", "surplus")
"""Of each plan: its iterations, the columns, draft tokens of each sequence (-1: they differ, and their pairs
are logged), and accepted draft tokens of sequences that had ended before, and of those behind an end."""
_PACK: Final = Struct(f"={len(_PLAN)}q").pack


class DraftLog:
    """The draft tokens of the iterations of one replica. first_iteration: see `BurstLog`."""

    def __init__(self, first_iteration: int) -> None:
        self.bursts = BurstLog(first_iteration)
        """Accepted draft tokens of each pass."""
        self._drafts = bytearray()  # per plan: `_PLAN`
        self._sums = bytearray()  # per iteration: tokens that sequences got
        self._blocks = bytearray()  # per iteration of a leap: KV blocks in use beside those of the first
        self._pairs = bytearray()  # per iteration: query-key pairs of draft tokens, if they are logged
        self._buffers = MappedBuffers(self._drafts, self._sums, self._blocks, self._pairs)

    @property
    def num_bytes(self) -> int:
        """Memory of the log without its bursts, bytes."""
        return self._buffers.num_all_bytes()

    def add(
        self,
        drafts: DraftPlan,
        contexts: list[int],
        *,
        num_proposed: int | None,
        ended: Collection[Sequence],
    ) -> None:
        """Logs iterations of a plan that are about to be committed.

        contexts: tokens that all decodes attend to in each. num_proposed: draft tokens that were made for the
        next passes; None: as many as were asked for. ended: sequences that had ended before.
        """
        num_iterations, num_seqs, rows = len(contexts), len(drafts.seqs), drafts.num_drafts
        accepted, depth, common = drafts.accepted, drafts.depth, drafts.common
        assert accepted is not None
        if num_iterations < len(accepted):
            accepted = accepted[:num_iterations]
        totals, surplus, num_lost, num_surplus = drafts.totals[num_iterations - 1], None, 0, 0
        if np.count_nonzero(totals > drafts.end):
            surplus = np.maximum(totals - drafts.end, 0)
        if common:
            num_judged, num_verified = num_seqs, num_seqs * common
        else:
            num_judged, num_verified = int(np.count_nonzero(rows)), int(np.add.reduce(rows))
        if ended and (places := _places_of(ended, drafts.slots)):
            assert num_iterations == 1
            num_judged -= int(np.count_nonzero(rows[places]))
            num_verified -= int(np.add.reduce(rows[places]))
            num_lost = int(np.add.reduce(accepted[0][places]))
            accepted, depth = accepted.copy(), depth.copy()
            accepted[:, places] = depth[places] = 0
            if surplus is not None:
                surplus[places] = 0
        if surplus is not None:
            num_surplus = int(np.add.reduce(surplus))
        self.bursts.add(drafts, depth, accepted, surplus if num_surplus else None)
        if common is None or drafts.padded:
            common = -1
            self._pairs += array("q", pairs_of(drafts, contexts)).tobytes()
        self._sums += drafts.sums[:num_iterations].tobytes()
        if num_iterations > 1:
            self._blocks += drafts.num_new_blocks[:num_iterations].tobytes()
        num_next, num_drafted = drafts.next_counts
        made = drafts.next_levels, num_drafted, num_drafted if num_proposed is None else num_proposed
        of_pass = num_judged, num_verified, common, num_lost, num_surplus
        self._drafts += _PACK(num_iterations, drafts.num_tokens, num_next, *made, *of_pass)
        if len(self._drafts) >= self._buffers.limit:
            self._buffers.move()

    def fill(self, columns: dict[str, NDArray[Any]]) -> None:
        """Fills the columns of drafts, and corrects those that count them. The log is dropped."""
        plans = self._buffers.take(self._drafts, np.int64).reshape(-1, len(_PLAN))
        plan = dict(zip(_PLAN, plans.T, strict=True))
        num = plan["iterations"]
        for name in _PLAN_COLUMNS:
            columns[name][:] = np.repeat(plan[name], num)
        columns["sampled_seqs"] += columns["draft_tokens"].astype(np.int32)
        sums, num_seqs = self._buffers.take(self._sums, np.int64), columns["decode_seqs"].astype(np.int64)
        last = np.cumsum(num) - 1
        first = last - num + 1
        accepted = sums - num_seqs
        accepted[first] -= plan["lost"]
        columns["accepted_tokens"][:] = columns["kept_tokens"][:] = accepted
        columns["kept_tokens"][last] -= plan["surplus"]
        has_chunks = columns["prefill_seqs"] > 0
        before = np.cumsum(sums) - sums
        grown = before - np.repeat(before[first], num)
        columns["kv_tokens_used"] += np.where(has_chunks, 0, grown)
        columns["decode_context_tokens"] += grown
        is_leap = np.repeat(num > 1, num)
        new_blocks = np.zeros(len(sums), np.int64)
        new_blocks[is_leap] = self._buffers.take(self._blocks, np.int64)
        columns["kv_blocks_used"] += np.where(has_chunks, 0, new_blocks).astype(np.int32)
        common = np.repeat(plan["common"], num)
        pairs = (columns["decode_context_tokens"] - num_seqs) * common
        pairs += num_seqs * (common * (common + 3) // 2)
        pairs[common < 0] = self._buffers.take(self._pairs, np.int64)
        columns["draft_pairs"][:] = pairs


def _places_of(ended: Collection[Sequence], slots: Ints) -> list[int]:
    """Returns the places of ended sequences among those of a plan, which have slots [sequences]."""
    return [place for seq in ended for place in np.flatnonzero(slots == seq.slot).tolist()]
