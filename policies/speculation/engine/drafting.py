"""The verification of draft tokens, as a part of an engine: `EngineCore.drafts`.

A decode is then a pass over 1 + K tokens, of which 1 to K + 1 are kept. The executor reports the number of
accepted draft tokens in `StepOutcome.accepted`. A plan that holds for several iterations stops after the
first iteration in which a sequence ends or KV blocks run out, which depends on the accepted tokens:
`Drafting.num_iterations_of` finds it. With asynchronous scheduling (`Ends.one_step_late`) a step is planned
before the previous step's tokens are known. All draft tokens of the step in flight count as computed until
they have been read, as in vLLM. The accepted tokens and the ended sequences of a step do not affect the next
plan. An executor may therefore report them late, and the plans are the same:

    simulator     plan 1 | commit 1 with acceptances | plan 2 | commit 2 with acceptances | plan 3
    real engine   plan 1 | commit 1 without | plan 2 | read 1 | commit 2 without | plan 3 | read 2 ...

A commit without acceptances (`StepOutcome.accepted` is None) adds the one certain token to each decoding
sequence and ends those that reach their limit with it; `Drafting.read` adds the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace

import numpy as np

from policies.batching import Batching, BatchingTraits
from policies.caching.pool import BlockPool
from policies.core.limits import RejectedError
from policies.core.parts import Engine
from policies.core.plan import Progress, StepOutcome, StepPlan
from policies.core.release import VLLM_0_32, Release
from policies.core.request import Request
from policies.core.sequence import DECODING, ENDING, WAITING, FinishReason, Sequence
from policies.core.state import EngineState
from policies.speculation.engine.draft_set import DraftSet
from policies.speculation.engine.drafts import DraftPlan, Ints, Shapes, Speculation, check_accepted
from policies.speculation.engine.step import DraftRows
from policies.speculation.engine.watch import DraftWatch
from policies.user_code import traits_of


def iterations_to_event(
    drafts: DraftPlan, accepted: Ints, decodes: DraftSet, rows: DraftRows, pool: BlockPool
) -> tuple[int, Ints]:
    """Returns the result of `Drafting.num_iterations_of`, and stores totals and blocks in the drafts."""
    drafts.judge(accepted)
    num_iterations = len(accepted)
    if num_iterations == 1:
        return 1, drafts.num_new_blocks
    # From one iteration to the next, no number decreases.
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
    """Stores the blocks that the sequences of a plan had before they got those of the worst case."""

    def __init__(self, drafts: DraftPlan, decodes: DraftSet, rows: DraftRows, pool: BlockPool) -> None:
        self._decodes = decodes
        self._rows = rows
        self._pool = pool
        self._before: Ints = decodes.blocks_S[drafts.slots]

    def settle(self, drafts: DraftPlan, num_iterations: int) -> None:
        """Frees the blocks that were not needed for the accepted tokens.

        Afterwards the sequences have the same blocks as after single steps.
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


class Drafting:
    """Plans, commits and reads the draft tokens of one engine; `attach` must be called next."""

    decodes: DraftSet
    """The decoding sequences."""
    watch: DraftWatch
    """Chooses the numbers of draft tokens, and counts accepted ones."""
    _core: Engine
    _rows: DraftRows
    _reservation: Reservation  # valid while iterations are reserved

    def __init__(self, speculation: Speculation, pool: BlockPool, release: Release = VLLM_0_32) -> None:
        self.speculation = replace(speculation, draft_length=deepcopy(speculation.draft_length))
        rules = speculation.proposer.rules
        self._caches_verified = release.caches_verified
        is_covered = (
            rules.drops_last_block
            and release.hashes_ahead
            and pool.look_ahead(max(rules.prefill_lookahead, 1))
        )
        pool.drops_last_block = rules.drops_last_block and not is_covered
        pool.num_reprefillable_tokens = max(rules.prefill_lookahead - 1, 0)
        self._pool = pool
        self._reads_late = False
        self._late: StepPlan | None = None  # committed; its acceptances are not known yet

    # The parts of an engine.

    def new_decodes(self, max_num_seqs: int, max_model_len: int) -> DraftSet:
        """Returns an empty set of decoding sequences with draft tokens."""
        self.decodes = DraftSet(max_num_seqs, self._pool, max_model_len)
        return self.decodes

    def new_rows(self, state: EngineState, batching: Batching) -> DraftRows:
        """Returns the part of a step that draft tokens use."""
        max_inputs = traits_of(batching, BatchingTraits).max_num_batched_tokens or 0
        self._rows = DraftRows(state, self.speculation, self.decodes, max_inputs)
        return self._rows

    def attach(self, core: Engine, reads_late: bool) -> None:
        """Attaches to an engine.

        reads_late: whether the engine plans a step before it reads the last tokens.
        """
        self._core = core
        self._reads_late = self.decodes.reads_late = reads_late
        self.decodes.caches_verified = self._caches_verified and not reads_late
        self.watch = DraftWatch(self.speculation, core.view, self.decodes, reads_late=reads_late)

    @property
    def max_tokens_per_pass(self) -> int:
        """Maximum number of tokens per decode in an iteration."""
        return 1 + Shapes(self.speculation.proposer).max_depth

    @staticmethod
    def check(request: Request) -> None:
        """Raises RejectedError for a request with branches."""
        if request.branching is not None:
            raise RejectedError(
                f"{request.branching.width} branches: an engine that speculates serves one answer per "
                "request; choose speculation=none, or send each branch as a request"
            )

    # Steps.

    def plan(self, now: float) -> StepPlan | None:
        """Returns the next step, as `EngineCore.plan` does; its `drafts` are the draft tokens to verify.

        If it returns None after a commit without acceptances, the acceptances must be read before the next
        call.
        """
        core, decodes = self._core, self.decodes
        if self._late is None and not self.watch.is_fixed:
            decodes.hide()
        plan = core.plan_step(now)
        if plan is not None:
            self._decide(plan, drafts_of(plan), now)
        if self._late is None:
            decodes.show(plan)
            if plan is None:
                self.watch.read()
        return plan

    def _decide(self, plan: StepPlan, drafts: DraftPlan, now: float) -> None:
        """Decides the numbers of draft tokens of the pass after the step just planned."""
        try:
            self.watch.decide(plan, drafts, now, self._core.step.tokens_left)
        except Exception:
            self._core.cancel(plan)  # no plan is in flight after a failed call
            raise

    def plan_unasked(self, max_unasked: int, is_undisturbed: bool) -> StepPlan | None:
        """Returns a step that decodes all sequences while nothing changes; None if policies must be called.

        is_undisturbed: whether the plan need not list changes since the last one.
        """
        core, decodes = self._core, self.decodes
        all_decode = is_undisturbed and decodes.size + core.num_held == core.num_in_engine
        if all_decode and 0 < decodes.size <= max_unasked:
            plan = self._rows.unasked(max_unasked) if self._rows.is_alike else self._built(max_unasked)
            if plan is not None:
                return plan
        if self._late is None:
            decodes.hide()  # what policies must not see
        return None

    def _built(self, max_num_tokens: int) -> StepPlan | None:
        """Returns a repeatable step of max_num_tokens in which all decode; None if there is no room."""
        step = self._core.step
        step.begin()
        step.budget(max_num_tokens)
        if not step.decode_together():
            return None
        step.repeat()
        return step.end()

    def make_room(self) -> None:
        """Reads the tokens of the previous step after a step that computes nothing.

        From then on rejected draft tokens no longer count as computed, and sequences may turn out to have
        ended.
        """
        decodes = self.decodes
        if any(int(decodes.base_S[seq.slot]) > seq.num_computed for seq in decodes.members):
            self._core.step.has_read = True
            if self._late is None:  # else the caller reads them now
                decodes.show(None)
                self.watch.read()
                self._offer_read()
                decodes.rest()

    # Commits.

    def commit(self, plan: StepPlan, outcome: StepOutcome, now: float) -> Progress:
        """Applies the outcome of a plan, as `EngineCore.commit` does.

        outcome.accepted: accepted draft tokens [iterations, sequences of plan.drafts]. None, with
        asynchronous scheduling: `read` will report the acceptances of one iteration after the next call of
        `plan`; the proposer must have drafted the requested number of tokens. In this case only sequences
        that are certain to have ended are returned.
        """
        core, drafts = self._core, drafts_of(plan)
        if self._late is not None:
            raise ValueError(
                "commit: read must be called first for the step before, which had no acceptances"
            )
        accepted, decodes = outcome.accepted, self.decodes
        if accepted is None and drafts.accepted is not None:  # as `num_iterations_of` was told
            accepted = drafts.accepted[: outcome.iterations]
        if self._reads_late:
            self._offer_read()
            if accepted is None:
                if outcome.iterations != 1 or outcome.proposed is not None:
                    raise ValueError(
                        f"commit of {outcome.iterations} iterations without acceptances: must be of 1, and "
                        "without outcome.proposed"
                    )
                accepted = np.zeros((1, len(drafts.seqs)), np.int64)
                self._late = plan
        if drafts.accepted is None or outcome.accepted is not None:
            accepted = check_accepted(drafts, accepted, outcome.iterations)
            drafts.judge(accepted)
        if core.num_reserved:
            core.check_commit(plan, outcome.iterations, now)
            self._reservation.settle(drafts, outcome.iterations)
        if self._late is None:
            self.watch.record(drafts, accepted)
        if not plan.num_decodes:
            decodes.rest()
        progress = core.commit_step(plan, outcome, now)
        self._set_next(drafts, outcome)
        if self.decodes.caches_verified:
            self._offer_read()
        self.watch.committed(progress, now)
        if self._late is not None:
            decodes.num_unread = 0
        return progress

    def _set_next(self, drafts: DraftPlan, outcome: StepOutcome) -> None:
        """Sets the draft tokens of the next pass of each sequence that got a token."""
        decodes, num_decodes, num_next = self.decodes, len(drafts.seqs), drafts.next_drafts
        if outcome.proposed is not None:
            num_next = outcome.proposed
        decodes.drafts_S[drafts.slots] = num_next[:num_decodes]
        if len(num_next) == num_decodes:
            return
        for seq, num in zip(drafts.next_seqs[num_decodes:], num_next[num_decodes:].tolist(), strict=True):
            if seq.state is DECODING:
                decodes.drafts_S[seq.slot] = num
                if decodes.reads_late:
                    decodes.base_S[seq.slot] += drafts.padded.get(seq.request_id, 0)

    def advance(self, plan: StepPlan, outcome: StepOutcome) -> list[Sequence]:
        """Advances the decoding sequences of a plan; returns the sequences that end."""
        return self.decodes.advance_by(drafts_of(plan), outcome.iterations)

    def read(self, plan: StepPlan, accepted: Ints, stopped: Iterable[Sequence] = ()) -> list[Sequence]:
        """Applies the acceptances of a plan that was committed without them; returns the ended sequences.

        Must be called after the next call of `plan`, and before the plan that this call may return is
        committed. accepted: accepted draft tokens [1, sequences of plan.drafts], up to the stop token of a
        sequence that stops. stopped: sequences with a stop token in this step. Sequences that have already
        ended are ignored. A sequence that the next plan has preempted ends at once and is removed from that
        plan's list; other sequences hold slot and blocks until the next commit. Sequences returned by the
        commit of this plan are not returned again.
        """
        if plan is not self._late:
            raise ValueError("read: must be of the plan that was committed last, without acceptances")
        core, drafts, decodes = self._core, drafts_of(plan), self.decodes
        accepted = check_accepted(drafts, accepted, 1)
        self._late = None
        self.watch.read(drafts, accepted)
        certain = drafts.num_computed + 1
        after = certain + accepted[0]
        ends = np.flatnonzero((after >= drafts.end) & (certain < drafts.end)).tolist()
        decodes.add_kept(drafts, np.minimum(after, drafts.end) - certain)
        finished = [drafts.seqs[index] for index in ends if drafts.seqs[index].finish_reason is None]
        for seq in stopped:
            if seq.finish_reason is None:
                seq._end_reason = FinishReason.stop
                if seq not in finished:
                    finished.append(seq)
        self._end_read(finished)
        self.watch.ended(finished)
        if core.in_flight is not None:
            decodes.update(core.in_flight)
            return finished
        self._offer_read()
        decodes.rest()
        core.free_ending()
        return finished

    def _end_read(self, finished: list[Sequence]) -> None:
        """Ends sequences that turn out to have ended with the previous step."""
        core = self._core
        for seq in finished:
            if seq.state is WAITING:
                core.withdraw(seq, seq._end_reason)
            elif seq.state is not DECODING:  # a policy has paused it
                seq.finish_reason = seq._end_reason
                core.running_set.ending[seq.request_id] = seq
        core.end_finished([seq for seq in finished if seq.state is DECODING])

    def note_read(self, has_read: bool) -> None:
        """Sets whether the tokens of the step in flight have been read, while sequences leave."""
        self.decodes.is_read = has_read and self._reads_late

    def _offer_read(self) -> None:
        """Offers the tokens of the previous step to the cache, because they have been read."""
        pool = self._pool
        if pool.needs_offers:
            for seq in self._core.running.values():
                if seq.state is DECODING or seq.state is ENDING:
                    pool.offer_known(seq, seq.num_computed - pool.num_reprefillable_tokens)

    # Several iterations of one plan.

    def num_iterations_of(self, plan: StepPlan, accepted: Ints) -> tuple[int, Ints]:
        """Returns the iterations until the first event, and the KV blocks of each iteration after the first.

        accepted: draft tokens that would be accepted [iterations, sequences]; a commit without acceptances
        uses these. The last iteration is the first one in which a sequence ends, or the one before blocks run
        out or the model's context may be full.
        """
        drafts = drafts_of(plan)
        check_accepted(drafts, accepted, len(accepted))
        return iterations_to_event(drafts, accepted, self.decodes, self._rows, self._pool)

    def take_blocks_of(self, plan: StepPlan, num_iterations: int) -> None:
        """Takes the KV blocks that `num_iterations_of` has computed for the iterations after the first."""
        if num_iterations > 1:
            drafts = drafts_of(plan)
            self._pool.take(int(drafts.num_new_blocks[num_iterations - 1]))
            self.decodes.blocks_S[drafts.slots] = drafts.num_blocks[num_iterations - 1]

    def blocks_of_repeats(self, plan: StepPlan, num_repeats: int) -> int:
        """Returns the blocks that `num_iterations_of` has computed for the iterations after the first."""
        return int(drafts_of(plan).num_new_blocks[num_repeats])

    def max_iterations_of(self, plan: StepPlan, limit: int) -> int:
        """Returns how many iterations of a plan, up to limit, may run before their acceptances are read.

        For any acceptances, they have no event before the last one and need no block with content. The number
        is 1 before `read`.
        """
        if self._late is not None:
            return 1
        pool = self._pool
        worst = np.tile(drafts_of(plan).depth, (min(limit, plan.horizon), 1))
        num_iterations, num_blocks = self.num_iterations_of(plan, worst)
        drafts_of(plan).accepted = None  # it was no more than a question
        while num_iterations > 1 and num_blocks[num_iterations - 1] > pool.num_free_without_content:
            num_iterations -= 1
        return num_iterations

    def reserve(self, plan: StepPlan, num_iterations: int) -> None:
        """Takes the KV blocks of num_iterations iterations of the plan in flight before they are run.

        The blocks cover the worst case, in which every draft token is accepted: `decodes.blocks_S` counts
        them. The commit, of exactly num_iterations, frees the unneeded ones. num_iterations: from
        `max_iterations_of`.
        """
        if num_iterations > 1:
            self._core.num_reserved = num_iterations
            self._reservation = Reservation(drafts_of(plan), self.decodes, self._rows, self._pool)
            self.take_blocks_of(plan, num_iterations)


def drafts_of(plan: StepPlan) -> DraftPlan:
    """Returns the draft tokens of a plan of an engine that speculates."""
    assert isinstance(plan.drafts, DraftPlan)
    return plan.drafts
