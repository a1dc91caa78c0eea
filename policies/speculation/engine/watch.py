"""Counts the acceptances of an engine that speculates, and calls its draft-length policy."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from math import nan

import numpy as np

from policies.core.plan import Progress, StepPlan
from policies.core.sequence import Sequence
from policies.core.view import StepView
from policies.speculation import AcceptanceCounts, DraftView
from policies.speculation.draft_lengths import Fixed
from policies.speculation.engine.draft_set import DraftSet
from policies.speculation.engine.drafts import DraftPlan, Ints, Shapes, Speculation
from policies.user_code import checked_draft_lengths

MAX_UNCOUNTED = 256
"""Number of steps after which acceptances are counted even if no policy reads them."""
NUM_COUNTS = 5  # per sequence: passes, draft tokens, accepted ones, consecutive misses, output tokens


class DraftWatch:
    """Counts acceptances, and calls the draft-length policy for the next pass of each sequence.

    reads_late: whether the acceptances of a step are known only after the next one was planned.
    """

    def __init__(
        self, speculation: Speculation, view: StepView, decodes: DraftSet, *, reads_late: bool
    ) -> None:
        self._policy = speculation.draft_length
        self._choose = checked_draft_lengths(self._policy)
        self._step_view = view
        self._decodes = decodes
        self._reads_late = reads_late
        self._shapes = Shapes(speculation.proposer)
        self._acceptance = AcceptanceCounts.zero(self._shapes.max_depth)
        self._uncounted: list[tuple[Ints, Ints]] = []  # depth [sequences], accepted [iterations, sequences]
        self._view = DraftView(
            self._shapes.max_depth,
            self._acceptance,
            view.num_blocks,
            speculation.estimate,
            speculation.tpot_s,
        )
        self._reads_sequences = self._policy.reads_sequences
        self.is_fixed = isinstance(self._policy, Fixed)
        """Whether the policy's decision is constant, independent of the step and of acceptances."""
        self._levels = self._choose(self._view) if self.is_fixed else 0
        self._counts: dict[int, tuple[Ints, float]] = {}  # by request id: counts, time of the first token
        self._unread: list[tuple[DraftPlan, Ints]] = []
        self._ended: list[Sequence] = []  # if tokens are read late: ended with the last step

    def decide(self, plan: StepPlan, drafts: DraftPlan, now: float, tokens_left: int) -> None:
        """Sets the draft tokens for the next passes of the sequences that get a token in a plan.

        tokens_left: unused tokens of the step's budget.
        """
        view, seqs = self._view, drafts.seqs
        completing = [chunk.seq for chunk in plan.chunks if chunk.completes] if plan.chunks else ()
        if completing:
            drafts.next_seqs = seqs = [*seqs, *completing]
        if not self.is_fixed:
            self._show(plan, drafts, now, tokens_left)
        num_levels = self._levels if self.is_fixed else self._choose(view)
        rows = self._shapes.rows
        if isinstance(num_levels, np.ndarray):
            drafts.next_drafts = num_next = rows[num_levels]
            drafts.next_counts = int(np.count_nonzero(num_next)), int(np.add.reduce(num_next))
            drafts.next_levels = int(num_levels.max(initial=0))
            is_same = not completing and bool((drafts.next_drafts == drafts.num_drafts).all())
        else:
            num_rows = int(rows[num_levels])
            num_seqs = len(seqs)
            is_same = not completing and (
                drafts.common == num_rows or bool(np.count_nonzero(drafts.num_drafts == num_rows) == num_seqs)
            )
            drafts.next_levels = num_levels if num_seqs else 0
            drafts.next_counts = num_seqs if num_rows else 0, num_seqs * num_rows
            drafts.next_drafts = drafts.num_drafts if is_same else np.full(num_seqs, num_rows)
            drafts.are_alike = is_same
            if is_same:
                drafts.common = num_rows
        plan.horizon = min(plan.horizon, self._policy.num_repeats if is_same else 1)

    def _show(self, plan: StepPlan, drafts: DraftPlan, now: float, tokens_left: int) -> None:
        """Shows a plan to a policy that reads it."""
        view, step_view, seqs = self._view, self._step_view, drafts.next_seqs
        completing = seqs[len(drafts.seqs) :]
        view.now = now
        view.num_iterations = step_view.num_iterations
        view.num_requests = len(drafts.seqs) + len(plan.chunks)
        view.num_waiting = step_view.num_waiting
        view.num_free_blocks = step_view.num_free_blocks
        view.tokens_left = tokens_left
        view.sequences = seqs
        view.num_context_tokens = plan.num_decode_context_tokens + sum(seq.num_known for seq in completing)
        if self._uncounted:
            self._count_all()
        if self._reads_sequences:
            self._show_sequences(view, seqs)

    def _show_sequences(self, view: DraftView, seqs: SequenceOf[Sequence]) -> None:
        none = np.zeros(NUM_COUNTS, np.int64), nan
        rows = [self._counts.get(seq.request_id, none) for seq in seqs]
        counts = np.array([row for row, _ in rows], np.int64).reshape(-1, NUM_COUNTS)
        view.num_passes, view.num_drafted, view.num_accepted, view.num_misses, view.num_output_tokens = (
            counts.T
        )
        view.first_token_s = np.array([first_s for _, first_s in rows])

    def record(self, drafts: DraftPlan, accepted: Ints) -> None:
        """Records the acceptances [iterations, sequences] of a plan that is about to be committed."""
        if self.is_fixed:
            return
        self.read()
        num_read = len(accepted) - self._reads_late
        if num_read:
            self._count(drafts, accepted[:num_read])
        if self._reads_late:
            self._unread.append((drafts, accepted[num_read:]))

    def read(self, drafts: DraftPlan | None = None, accepted: Ints | None = None) -> None:
        """Counts the acceptances of the last pass, and of a plan [iterations, sequences], if any."""
        if self._unread:
            unread, self._unread = self._unread, []
            for each in unread:
                self._count(*each)
        if drafts is not None and accepted is not None and not self.is_fixed:
            self._count(drafts, accepted)

    def _count(self, drafts: DraftPlan, accepted: Ints) -> None:
        self._uncounted.append((drafts.depth, accepted))
        if len(self._uncounted) >= MAX_UNCOUNTED:
            self._count_all()
        if self._reads_sequences:
            self._count_sequences(drafts, accepted)

    def _count_all(self) -> None:
        """Counts the read passes per place, many at once."""
        uncounted, self._uncounted = self._uncounted, []
        accepted = np.concatenate([each.ravel() for _, each in uncounted])
        depth = np.concatenate([each for each, passes in uncounted for _ in passes])
        total, has_drafts = self._acceptance, depth > 0
        num_places = len(total.accepted)
        reached = np.bincount(accepted[has_drafts], minlength=num_places + 1)[: num_places + 1]
        drafted = np.bincount(depth[has_drafts], minlength=num_places + 1)[: num_places + 1]
        total.accepted += reached[:0:-1].cumsum()[::-1]
        total.drafted += drafted[:0:-1].cumsum()[::-1]
        total.num_passes += int(np.count_nonzero(has_drafts))

    def _count_sequences(self, drafts: DraftPlan, accepted: Ints) -> None:
        num_iterations = len(accepted)
        sums = accepted.sum(axis=0).tolist()
        hits = accepted > 0
        misses = np.where(hits.any(axis=0), hits[::-1].argmax(axis=0), num_iterations).tolist()
        for seq, depth, num, num_missed in zip(drafts.seqs, drafts.depth.tolist(), sums, misses, strict=True):
            row = self._counts.get(seq.request_id)
            if row is None:
                continue
            counts = row[0]
            counts[4] += num + num_iterations
            if depth:
                counts[0] += num_iterations
                counts[1] += num_iterations * depth
                counts[2] += num
                counts[3] = num_missed if num else counts[3] + num_iterations

    def committed(self, progress: Progress, now: float) -> None:
        """Adds sequences with a first token to the counts, and drops those that have ended."""
        if not self._reads_sequences:
            return
        prefilled, finished = progress
        if self._reads_late:  # their end is unknown to the next plan
            finished, self._ended = self._ended, finished
        for seq in prefilled:
            if seq.request_id not in self._counts:
                counts = np.zeros(NUM_COUNTS, np.int64)
                counts[4] = 1
                self._counts[seq.request_id] = counts, now
        for seq in finished:
            self._counts.pop(seq.request_id, None)

    def ended(self, finished: list[Sequence]) -> None:
        """Adds sequences that turn out to have ended with the last step."""
        if self._reads_sequences:
            self._ended = [*self._ended, *finished]
