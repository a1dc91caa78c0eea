"""The serving loop of one model instance, without time and without tensors.

    plan = core.plan(now)              # the policies decide; KV blocks are reserved
    outcome = <an executor runs it>    # sim: a hardware model gives the duration. realengine: kernels run
    core.commit(plan, outcome, now)    # sequences advance, end, free their blocks

There is no prefill phase and no decode phase: a sequence has computed tokens and known tokens, and a step
distributes tokens until the budget is used up. Sequences with one uncomputed token that decode together form
the decode set, which advances in constant time (policies/core/decode_set.py). policies/core/state.py
describes how a sequence moves between the queue, the running set and its end, policies/core/transfers.py the
transfers of KV between tiers. Requests may be added at any time and aborted between commit and plan; both
take effect with the next plan. After every plan, `take_transfers` returns the KV transfers to run; the caller
reports a finished load with `loaded`. A caller that runs several iterations of a plan at once reserves their
blocks before, with `reserve`.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from math import inf
from typing import NoReturn

from policies.batching import supports_mixed_role
from policies.core.engine_transfers import TransferringEngine
from policies.core.horizon import blocks_of_repeats, cut_horizon
from policies.core.livelock import MAX_STEPS, MAX_WAITS
from policies.core.plan import Chunk, Progress, StepOutcome, StepPlan
from policies.core.policy_names import name_of
from policies.core.sequence import ACTIVE_STATES, ENDED, WAITING, FinishReason, Sequence
from policies.user_code.decisions import WrongDecisionError


class EngineCore(TransferringEngine):
    """Queues, slots and KV blocks of one engine, and the policies that act on them.

    batching, scheduling, predictor: the engine uses its own copies, so that the state of a policy is never
    shared with another engine, and the caller's objects do not change.
    max_num_seqs: slots, sequences that may hold KV at the same time. max_model_len: prompt and output tokens
    of one sequence; a small cache lowers it. num_swap_blocks: blocks of host memory for preempted KV.
    names_blocks: transfers have block ids, for an engine that copies bytes; decisions do not change.
    residents: the LoRA adapters that are served from the same pool; None: no adapters.
    """

    def plan(self, now: float) -> StepPlan | None:
        """Returns the next step; None if there is nothing to compute now.

        A plan must be committed before the next call. After None, call it again at the next event (such as an
        arrival) and at `wake_s`. In both cases call `take_transfers` afterwards. Raises WrongDecisionError if
        the policies schedule nothing although requests are unfinished and no transfer is in progress.
        """
        if self._in_flight is not None:
            self._check_at_rest("plan")
        if not now >= self._now:
            self._refuse_past(now)
        pool = self.block_pool
        self._now = pool.now = now
        if pool.expires_s <= now:
            pool.expire()
        plan = self._plan_unasked()
        if plan is None:
            self.wake_s, self.waits_for = inf, None
            if self._sequences:
                plan = self._ask(now)
        self._in_flight = plan
        return plan

    def _ask(self, now: float) -> StepPlan | None:
        """Lets the policies build a step, and another one if the step only freed blocks."""
        step = self._step
        for _ in range(self._max_attempts):
            step.begin()
            for before_step in self._before_step:
                before_step(self.view, step, now)
            self.batching.fill(self.view, step, now)
            plan = step.end()
            if step.preempted and self._preemption_watch.is_livelock():
                self._refuse_livelock()
            if plan is not None:
                if self._lost or self._arrived:
                    self._add_earlier_changes(plan)
                return plan
            self._lost += step.preempted
            if not step.has_freed:
                break
        wake_s, self.waits_for = step.wake_s, step.waits_for()
        if wake_s is not None:
            self.wake_s = wake_s
        if self.wake_s == inf and not (step.has_freed or self._state.is_transferring):
            self._state.give_way()
        if self._may_compute_nothing():
            return None
        if wake_s is None or now >= wake_s:
            raise self._stuck("scheduled nothing")
        if self._waits.is_livelock(self.num_iterations, len(self._sequences)):
            raise self._stuck(f"has called step.wait_until {MAX_WAITS:,} times in a row")
        return None

    def end_traffic(self) -> bool:
        """Tells policies that nothing else will happen; returns whether they wait for an event.

        Then plan again. Raises WrongDecisionError if policies still wait when called a second time, unless
        for a replica of another role.
        """
        is_waiting = bool(self._sequences) and self.wake_s == inf and self._waits.num_waits > 0
        if not is_waiting or not supports_mixed_role(self.batching):
            return False
        if self._state.traffic_has_ended:
            raise self._stuck("waits for ever")
        self._state.traffic_has_ended = True
        return True

    def _stuck(self, did: str) -> WrongDecisionError:
        return WrongDecisionError(
            self.batching,
            "fill",
            f"{did} with {self.num_waiting} waiting and {len(self.running)} running",
            "it must decode, prefill or admit a sequence, or say with step.wait_until when to call it again, "
            "as the engine would never continue",
        )

    def _may_compute_nothing(self) -> bool:
        """Returns whether a step without tokens is no error of the policies."""
        return self._state.is_transferring

    def _plan_unasked(self) -> StepPlan | None:
        """Returns a step that decodes all sequences, while nothing changes; None: policies must be called."""
        decodes = self.decodes
        num_decodes = decodes.size
        if num_decodes + self._num_held != len(self._sequences) or not 0 < num_decodes <= self._max_unasked:
            return None
        pool = self.block_pool
        num_blocks = decodes.blocks_due_by_phase[decodes.clock % decodes.block_size]
        if num_blocks > pool.num_free or decodes.at_limit or self._lost or self._arrived:
            return None
        if num_blocks:
            pool.take(num_blocks)
        plan = self._decode_plan
        plan.index = self.num_iterations
        plan.num_decodes = num_decodes
        plan.num_widening = num_widening = decodes.num_widening
        plan.num_decode_context_tokens = decodes.num_context_tokens + num_widening
        plan.horizon = horizon = decodes.iterations_to_first_event()
        plan.until_s = pool.expires_s
        if num_decodes * (horizon // pool.block_size + 1) > pool.num_free_without_copy:
            plan.horizon = cut_horizon(plan, decodes, pool)
        return plan

    def _add_earlier_changes(self, plan: StepPlan) -> None:
        """Adds admissions and preemptions since the last computing step to a plan, for the records."""
        plan.preempted = [*self._lost, *plan.preempted]
        plan.admitted = [*(seq for seq in self._arrived if seq.state in ACTIVE_STATES), *plan.admitted]
        plan.horizon = 1
        self._lost = []
        self._arrived = []

    def commit(self, plan: StepPlan, outcome: StepOutcome, now: float) -> Progress:
        """Applies the outcome of a plan: its iterations, then the ends of sequences.

        Returns the sequences that completed their prefill, and those that ended.
        """
        num_iterations, ended = outcome.iterations, outcome.ended
        num_reserved = self._num_reserved
        self._check_commit(plan, num_iterations, now)
        pool = self.block_pool
        self._now = pool.now = self._state.last_end_s = now
        self._in_flight = None
        for on_commit in self._on_commit:
            on_commit(plan, num_iterations, now)
        if num_reserved:
            self._num_reserved = 0
        elif num_iterations > 1:
            self._take_repeats(plan, num_iterations - 1)
        self.num_iterations = pool.num_iterations = self.num_iterations + num_iterations
        finished = self._advance(plan, outcome) if plan.num_decodes else []
        prefilled = self._commit_chunks(plan, outcome, finished) if plan.chunks else []
        if ended:
            self._note_ends(ended, finished)
        if finished:
            self._finish(finished)
        if self._loaded_in_flight or self._adapters_in_flight:
            self._take_loaded()
        return prefilled, finished

    def _check_commit(self, plan: StepPlan, num_iterations: int, now: float) -> None:
        num_reserved = self._num_reserved
        if plan is not self._in_flight or not 1 <= num_iterations <= plan.horizon:
            raise ValueError(
                f"commit of {num_iterations} iterations: must be of the plan in flight and within its horizon"
            )
        if num_reserved and num_iterations != num_reserved:
            raise ValueError(f"commit of {num_iterations} iterations: must be {num_reserved}, as reserved")
        if not now >= self._now:
            self._refuse_past(now)

    def _finish(self, finished: list[Sequence]) -> None:
        """Ends sequences in the order of admission, in which blocks become free in vLLM, too."""
        if len(finished) > 1:
            finished.sort(key=lambda seq: seq.admission)
        for seq in finished:
            self._state.finish(seq, seq._end_reason)

    def _advance(self, plan: StepPlan, outcome: StepOutcome) -> list[Sequence]:
        """Advances the decoding sequences of a plan; returns the sequences that end."""
        if not plan.branched:
            return self.decodes.advance(outcome.iterations, plan.idle)
        finished = []
        if plan.num_decodes > plan.num_branches:
            finished = self.decodes.advance(outcome.iterations, plan.idle)
        for seq in plan.branched:
            if self.branched.produce(seq, outcome.parents.get(seq.request_id)):
                finished.append(seq)
        return finished

    def _take_repeats(self, plan: StepPlan, num_repeats: int) -> None:
        """Takes the KV blocks of all iterations except the first."""
        if plan.num_decodes:
            self.block_pool.take(self.decodes.blocks_due_after(1, num_repeats))
        if plan.chunks:
            self._grow_chunks(plan.chunks, num_repeats)

    def _commit_chunks(
        self, plan: StepPlan, outcome: StepOutcome, finished: list[Sequence]
    ) -> list[Sequence]:
        """Records computed chunks and adds ends to `finished`; returns sequences with a complete prefill."""
        prefilled = []
        notes_chunks = self._state.notes_chunks
        for seq, _, num_tokens, _ in plan.chunks:
            seq.stored_computed = num_computed = seq.stored_computed + num_tokens * outcome.iterations
            if notes_chunks:
                self.block_pool.computed(seq, num_computed)
            if num_computed < seq.stored_known:
                continue
            prefilled.append(seq)
            if self._end_prefill(seq, outcome):
                finished.append(seq)
        return prefilled

    def _end_prefill(self, seq: Sequence, outcome: StepOutcome) -> bool:
        """Gives a sequence its first token, or its branches theirs; returns whether it has ended."""
        if seq.request.branching is None:
            return self.running_set.begin_decoding(seq)
        self.running_set.fork(seq)
        return self.branched.produce(seq, outcome.parents.get(seq.request_id))

    def cancel(self, plan: StepPlan) -> list[Sequence]:
        """Cancels the plan in flight, which could not be run; aborts its sequences and returns them.

        The tokens that the plan would have computed are removed from the cache. A sequence that waits for a
        transfer and had a cache hit on some of them is aborted, too.
        """
        if plan is not self._in_flight:
            raise ValueError("cancel: must be called with the plan in flight")
        self._in_flight = None
        num_planned = dict.fromkeys(plan.decodes, max(1, self._num_reserved))
        num_planned |= {chunk.seq: chunk.num_tokens for chunk in plan.chunks}
        for owner in list(num_planned):
            num_planned |= {seq: 0 for seq in self.running_set.sharers(owner) if seq not in num_planned}
        self._num_reserved = 0
        for seq in sorted(num_planned, key=lambda seq: seq.admission, reverse=True):  # sharers before owners
            self._state.finish(seq, FinishReason.aborted, num_planned[seq])
        self._take_loaded()
        return list(num_planned)

    def reserve(self, plan: StepPlan, num_iterations: int) -> None:
        """Takes the KV blocks of num_iterations iterations of the plan in flight before they are run.

        Afterwards `block_ids` has the blocks of seq.num_known + num_iterations - 1 tokens, and only a commit
        of exactly num_iterations is allowed. Raises ValueError for a plan with chunks or branches, on a
        second call for the same plan, and beyond the plan's horizon.
        """
        if plan is not self._in_flight or not 1 <= num_iterations <= plan.horizon:
            raise ValueError(
                f"reserve for {num_iterations} iterations: must be of the plan in flight, within its horizon"
            )
        if plan.chunks or plan.branched:
            raise ValueError("reserve: the plan must have no prompt chunks and no branches; it is run once")
        if self._num_reserved:
            raise ValueError(f"reserve: {self._num_reserved} iterations of this plan are reserved already")
        self.block_pool.take(self.decodes.blocks_due_after(1, num_iterations - 1))
        self._num_reserved = num_iterations

    def block_ids(self, seq: Sequence, num_tokens: int) -> list[int]:
        """Returns the physical ids of the blocks of a running sequence's first num_tokens tokens.

        Blocks of planned tokens are included. Tokens that a lossy cache has dropped count, but have no block.
        While the sequence decodes with branches, only the prompt's full blocks are included; see
        `BranchSet.block_ids`.
        """
        return self.block_pool.block_ids(seq, num_tokens - seq.num_dropped)

    def blocks_of_repeats(self, plan: StepPlan, num_repeats: int) -> int:
        """Counts the blocks that num_repeats further iterations of a plan need; the first has its blocks."""
        return blocks_of_repeats(plan, num_repeats, self.decodes, self.block_pool)

    def _grow_chunks(self, chunks: SequenceOf[Chunk], num_repeats: int) -> None:
        """Grows several prompts in turns, as single steps would.

        The order matters, because a cache offers the first of several blocks with equal contents.
        """
        num_turns = num_repeats if len(chunks) > 1 else 1
        per_turn = num_repeats // num_turns
        for turn in range(num_turns):
            for chunk in chunks:
                first = chunk.num_cached + (1 + turn * per_turn) * chunk.num_tokens
                self.block_pool.grow(chunk.seq, first, first + per_turn * chunk.num_tokens)

    def _refuse_livelock(self) -> NoReturn:
        raise WrongDecisionError(
            self.batching,
            "fill",
            f"and scheduling={name_of(self.scheduling)} have preempted in {MAX_STEPS:,} steps and no "
            "sequence has got a token",
            "a policy must preempt only for a sequence that can be admitted (see `StepView.may_start`)",
        )

    @staticmethod
    def _note_ends(ended: tuple[Sequence, ...], finished: list[Sequence]) -> None:
        """Adds the sequences that the executor reports as ended to `finished`.

        Their reason is `stop`, even if they reach a limit with the same token.
        """
        for seq in ended:
            if seq.state is WAITING:
                raise ValueError(f"{seq!r} cannot have ended: it was not run")
            if seq.state is not ENDED:
                seq._end_reason = FinishReason.stop
                if seq not in finished:
                    finished.append(seq)

    def _refuse_past(self, now: float) -> NoReturn:
        """Raises ValueError, because ages and deadlines of policies require that time never decreases."""
        raise ValueError(f"now={now}: must be >= the time of the last call, {self._now}")
