"""The log of the iterations of a replica that speculates, with the draft tokens of each."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.core.engine import EngineCore
from policies.speculation.engine.drafts import DraftPlan, Ints
from sim.engine.running_step import RunningStep
from sim.records.iterations import CHUNKS, QUEUED, ROW, Gaps, IterationLog
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
        num_seqs, rows, num_iterations = len(drafts.seqs), drafts.num_drafts, step.num_iterations
        if num_iterations != len(ends_s):
            ends_s = ends_s[:num_iterations]
        contexts = np.add.reduce(computed, axis=1) + num_seqs
        pairs = computed @ rows
        pairs += int(np.dot(rows, rows + 3)) // 2
        counts = rows > 0
        if core.running_set.ending:
            ended = core.running_set.ending
            counts &= np.array([seq.request_id not in ended for seq in drafts.seqs], bool)
            accepted = np.where(counts, accepted, 0)
        others = core.num_tokens_held - int(np.add.reduce(drafts.num_computed)) + drafts.num_tokens
        more = CHUNKS if plan.chunks else 0
        if plan.waits_for is not None or plan.preempted or (more and core.num_waiting):
            more += QUEUED
            for _ in ends_s:
                self._add_queue(plan, core)
        if self.serves_adapters:
            for _ in ends_s:
                self._add_use(plan)
        self._ends_s += np.array(ends_s).tobytes()
        new = np.empty(num_iterations, ROW)
        new["start_s"][0], new["emitted_s"][0], new["num_apart"][0] = step.start_s, emitted_s, num_apart
        new["start_s"][1:] = new["emitted_s"][1:] = ends_s[:-1]
        new["num_apart"][1:] = new["clock"] = new["num_widening"] = 0
        new["num_iterations"] = 1
        new["decode_context_tokens"] = contexts
        new["kv_tokens_used"] = contexts + others
        new["decode_seqs"], new["running"], new["more"] = num_seqs, len(core.running), more
        new["kv_blocks_used"] = num_blocks[:num_iterations]
        self._rows += new.tobytes()
        num_next = drafts.next_drafts
        made = np.empty((num_iterations, len(DRAFT_COLUMNS)), np.int64)
        made[:, 0] = drafts.num_tokens
        made[:, 1] = pairs
        made[:, 2] = np.count_nonzero(num_next)
        made[:, 3] = num_next.max(initial=0)
        made[:, 4] = np.add.reduce(num_next)
        made[:, 5] = np.count_nonzero(counts)
        made[:, 6] = np.dot(rows, counts)
        made[:, 7] = np.add.reduce(accepted, axis=1)
        made[:, 8] = kept
        self._drafts += made.tobytes()
        if more & CHUNKS:
            self._add_chunks(step, core, int(new["kv_tokens_used"][0]), int(num_blocks[0]))
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
