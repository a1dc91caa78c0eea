"""The log of the iterations of a replica that speculates, with the draft tokens of each."""

from __future__ import annotations

from struct import Struct
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from policies.core.engine import EngineCore
from policies.speculation.engine.drafts import DraftPlan, Ints
from sim.engine.running_step import RunningStep
from sim.records.iterations import CHUNKS, QUEUED, Gaps, IterationLog, pack_row
from sim.records.mapped_buffers import MappedBuffers

DRAFT_COLUMNS = (
    *("draft_tokens", "draft_pairs", "draft_seqs", "draft_steps", "drafted_tokens"),
    *("draft_passes", "verified_tokens", "accepted_tokens", "kept_tokens"),
)
"""Columns of the iteration table if an engine speculates: the fields of `DraftWork`, then

    draft_passes     sequences with at least one draft token; without those that had ended before
    verified_tokens  their draft tokens
    accepted_tokens  those that were accepted
    kept_tokens      those that were accepted and precede the end of the answer
"""
_PACK_END: Final = Struct("=d").pack
_PACK: Final = Struct(f"={len(DRAFT_COLUMNS)}q").pack


class DraftLog(IterationLog):
    """The iterations of one replica that speculates, one row per iteration."""

    def __init__(self, replica: int, block_size: int, serves_adapters: bool = False) -> None:
        super().__init__(replica, block_size, serves_adapters)
        self._drafts = bytearray()
        self._buffers = MappedBuffers(
            self._rows,
            self._ends_s,
            self._blocks_due,
            self._queues,
            self._chunks,
            self._adapters,
            self._drafts,
        )

    @property
    def more_dtypes(self) -> dict[str, str]:
        """The dtypes of further columns of the table, by name."""
        return super().more_dtypes | dict.fromkeys(DRAFT_COLUMNS, "i8")

    def add_passes(
        self,
        step: RunningStep,
        core: EngineCore,
        emitted_s: float,
        num_apart: int,
        *,
        accepted: Ints,
        computed: Ints,
        kept: Ints,
        num_blocks: Ints,
    ) -> None:
        """Logs iterations that are about to be committed, each as a row.

        accepted, computed [iterations, sequences]: accepted draft tokens, and computed tokens before. kept:
        draft tokens that stay, by iteration. num_blocks: KV blocks in use. Others as for `IterationLog.add`.
        """
        plan, ends_s, drafts = step.plan, step.ends_s, step.plan.drafts
        assert isinstance(drafts, DraftPlan)
        num_seqs, rows = len(drafts.seqs), drafts.num_drafts
        contexts = (computed.sum(axis=1) + num_seqs).tolist()
        pairs = (computed @ rows + (rows * (rows + 3)).sum() // 2).tolist()
        ended = core.running_set.ending
        counts = rows > 0
        if ended:
            counts &= np.array([seq.request_id not in ended for seq in drafts.seqs], bool)
        judged = int(np.count_nonzero(counts)), int(rows[counts].sum())
        num_accepted, num_kept = accepted[:, counts].sum(axis=1).tolist(), kept.tolist()
        num_next = drafts.next_drafts
        made = int(np.count_nonzero(num_next)), int(num_next.max(initial=0)), int(num_next.sum())
        others = core.num_tokens_held - int(drafts.num_computed.sum()) + drafts.num_tokens
        more = CHUNKS if plan.chunks else 0
        if plan.waits_for is not None or plan.preempted or (more and core.num_waiting):
            more += QUEUED
        start_s = step.start_s
        for index, context in enumerate(contexts):
            end_s = ends_s[index]
            if more & QUEUED:
                self._add_queue(plan, core)
            self._ends_s += _PACK_END(end_s)
            if self.serves_adapters:
                self._add_use(plan)
            num_held = others + context
            row = (context, num_held, 0, 1, num_apart, 0, num_seqs, len(core.running))
            self._rows += pack_row(start_s, emitted_s, *row, int(num_blocks[index]), more)
            self._drafts += _PACK(
                drafts.num_tokens, pairs[index], *made, *judged, num_accepted[index], num_kept[index]
            )
            start_s = emitted_s = end_s
            num_apart = 0
            if more & CHUNKS:
                self._add_chunks(step, core, num_held, int(num_blocks[index]))
        if len(self._rows) >= self._buffers.limit:
            self._buffers.move()

    def expand(self, columns: dict[str, NDArray[Any]], gaps: Gaps) -> int:
        """Fills the columns as `IterationLog.expand` does, and those of drafts."""
        drafts = self._buffers.take(self._drafts, np.int64).reshape(-1, len(DRAFT_COLUMNS))
        num_gaps = super().expand(columns, gaps)
        for name, column in zip(DRAFT_COLUMNS, drafts.T, strict=True):
            columns[name][:] = column
        columns["sampled_seqs"] += drafts[:, 0].astype(np.int32)
        return num_gaps
