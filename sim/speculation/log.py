"""The log of the iterations of a replica that speculates, with the draft tokens of each."""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from policies.core.engine import EngineCore
from policies.core.sequence import Sequence
from policies.speculation.engine.drafts import DraftPlan, Ints
from sim.engine.running_step import RunningStep
from sim.records.gaps import Gaps
from sim.records.iteration_rows import CHUNKS, QUEUED, pack_row, pack_times
from sim.records.iterations import IterationLog
from sim.records.mapped_buffers import MappedBuffers
from sim.speculation.bursts import BurstLog

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


class DraftLog(IterationLog):
    """The iterations of one replica that speculates."""

    def _begin(self, first_iteration: int) -> None:
        super()._begin(first_iteration)
        self.passes = BurstLog(first_iteration)
        """Accepted draft tokens of each pass."""
        self._no_blocks_due = bytes(4 * self.block_size)
        self._drafts = bytearray()  # per row: iterations, `_PLAN_COLUMNS`
        self._passes = bytearray()  # per row, for each of `_PASS_COLUMNS` one number per iteration
        self._buffers = MappedBuffers(
            *(self._rows, self._ends_s, self._blocks_due, self._queues, self._chunks, self._adapters),
            *(self._drafts, self._passes),
        )

    def _take(self, other: Self) -> None:
        super()._take(other)
        self.passes = other.passes
        self._drafts, self._passes = other._drafts, other._passes

    def more_dtypes(self) -> dict[str, str]:
        """Returns the dtypes of further columns of the table, by name."""
        return super().more_dtypes() | dict.fromkeys(DRAFT_COLUMNS, "i8")

    def add_passes(
        self,
        step: RunningStep,
        core: EngineCore,
        emitted_s: float,
        num_apart: int,
        *,
        accepted: Ints,
        contexts: Ints,
        pairs: Ints,
        surplus: Ints | None,
        num_proposed: int | None,
        num_new_blocks: Ints,
    ) -> None:
        """Logs iterations that are about to be committed.

        accepted [iterations, sequences]: accepted draft tokens. contexts, pairs: see `DraftRecorder`. surplus
        [sequences]: accepted draft tokens of the last iteration that lie behind the end of the answer; None:
        there are none. num_proposed: draft tokens that were made for the next passes; None: as many as were
        asked for. num_new_blocks: KV blocks in use beside those of the first iteration. Others as for
        `IterationLog.add`.
        """
        plan, ends_s, drafts = step.plan, step.ends_s, step.plan.drafts
        assert isinstance(drafts, DraftPlan)
        num_seqs, rows, num_iterations = len(drafts.seqs), drafts.num_drafts, step.num_iterations
        if num_iterations != len(ends_s):
            ends_s = ends_s[:num_iterations]
        depth, num_judged, num_verified = drafts.depth, num_seqs, num_seqs * (drafts.common or 0)
        if not drafts.common:
            num_judged, num_verified = int(np.count_nonzero(rows)), int(np.add.reduce(rows))
        ended = _places_of(core.running_set.ending.values(), drafts.slots) if core.running_set.ending else ()
        if ended:
            num_judged -= int(np.count_nonzero(rows[ended]))
            num_verified -= int(np.add.reduce(rows[ended]))
            accepted, depth = accepted.copy(), depth.copy()
            accepted[:, ended] = depth[ended] = 0
            if surplus is not None:
                surplus[ended] = 0
        num_surplus = 0 if surplus is None else int(np.add.reduce(surplus))
        self.passes.add(drafts, depth, accepted, surplus if num_surplus else None)
        context, blocks = int(contexts[0]), core.block_pool.num_used
        others = core.num_tokens_held - (context - num_seqs) + drafts.num_tokens
        more = CHUNKS if plan.chunks else 0
        if plan.waits_for is not None or plan.preempted or (more and core.num_waiting):
            more += QUEUED
            self._add_queue(plan, core)
        if self.serves_adapters:
            self._add_use(plan)
        self._ends_s += pack_times(ends_s)
        if num_iterations > 1:
            self._blocks_due += self._no_blocks_due
        counted = (num_iterations, num_apart, 0, num_seqs, len(core.running), blocks, more)
        self._rows += pack_row(step.start_s, emitted_s, context, context + others, 0, *counted)
        num_next, num_drafted = drafts.next_counts
        made = drafts.next_levels, num_drafted, num_drafted if num_proposed is None else num_proposed
        self._drafts += _PACK(num_iterations, drafts.num_tokens, num_next, *made, num_judged, num_verified)
        if num_iterations == 1:
            num_all = int(np.add.reduce(accepted[0]))
            self._passes += _PACK_PASS(context, blocks, int(pairs[0]), num_all, num_all - num_surplus)
        else:
            num_each = np.add.reduce(accepted, axis=1)
            for column in (contexts, num_new_blocks[:num_iterations] + blocks, pairs, num_each):
                self._passes += column.tobytes()
            num_each[-1] -= num_surplus
            self._passes += num_each.tobytes()
        if more & CHUNKS:
            self._add_chunks(step, core, context + others, blocks)
        if len(self._rows) >= self._buffers.limit:
            self._buffers.move()

    def expand(self, columns: dict[str, NDArray[Any]], gaps: Gaps) -> int:
        """Fills the columns as `IterationLog.expand` does, and those of drafts."""
        num_gaps = super().expand(columns, gaps)
        _fill(columns, self._columns_of_plans())
        return num_gaps

    def _columns_of_plans(self) -> dict[str, Ints]:
        """Returns the columns of the iterations that were logged by `add_passes`."""
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


def _fill(columns: dict[str, NDArray[Any]], found: dict[str, Ints]) -> None:
    """Fills the columns of drafts, and corrects those that count them, in some of the iterations."""
    for name in DRAFT_COLUMNS:
        columns[name][:] = found[name]
    columns["sampled_seqs"] += columns["draft_tokens"].astype(np.int32)
    grown = found["decode_context_tokens"] - columns["decode_context_tokens"]
    has_chunks = columns["prefill_seqs"] > 0
    columns["kv_tokens_used"] += np.where(has_chunks, 0, grown)
    columns["decode_context_tokens"] += grown
    columns["kv_blocks_used"][:] = np.where(has_chunks, columns["kv_blocks_used"], found["kv_blocks_used"])
