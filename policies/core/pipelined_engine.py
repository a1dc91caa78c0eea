"""The engine of a pipeline: batches are planned while others are still on their way through its stages.

    plan a    plan b    plan c         commit a    plan d     ...
    a: 1 3    b: 2      c: chunk of 4              d: 1 3 and whatever waits

Up to max_batches plans are in batch, and they are committed in their order. A sequence that awaits a token
is in one batch only: no later plan decodes it, preempts it or counts it as decoding until that batch is
committed, so groups of sequences go round the pipeline. The chunks of one prompt need no token: they follow
each other in as many batches as there are, because a planned chunk counts as computed. This is what vLLM's
scheduler does with pipeline parallelism (vllm 0.32, `step_with_batch_queue` with one batch per stage): the
next batch is scheduled as soon as there is room, and takes everything that is not in flight. A batch is not
cut into micro-batches, so sequences that were prefilled together stay together.

max_batch_seqs limits the sequences of a batch, as SGLang's pp_max_micro_batch_size does: SGLang has one batch
of requests per stage, each with its share of the slots.
While a request has branches, only one batch is in flight.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from policies.core.engine import EngineCore
from policies.core.plan import Chunk, Progress, StepOutcome, StepPlan
from policies.core.sequence import COMPUTING, DECODING, PREFILLING, Sequence


class _Batch(NamedTuple):
    """A plan in flight; each sequence with the number of its admission, which a preemption ends."""

    plan: StepPlan
    decodes: list[tuple[Sequence, int]]
    chunks: list[tuple[Chunk, int]]


class PipelinedEngineCore(EngineCore):
    """An `EngineCore` with several plans in flight. The other arguments are those of `EngineCore`.

    Every plan must be followed by `depart`, when it is run; then the next may be asked for, until `is_full`.
    """

    def __init__(self, *, max_batches: int, max_batch_seqs: int | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self._max_batches = max_batches
        self._batches: deque[_Batch] = deque()
        self._step.max_batch_seqs = max_batch_seqs

    def _attach(self) -> None:
        super()._attach()
        self._max_unasked = 0  # every plan is asked for: none repeats the one before

    @property
    def is_full(self) -> bool:
        """True if no batch may be planned before one is committed."""
        return len(self._batches) >= (1 if self.may_branch else self._max_batches)

    @property
    def num_tokens_held(self) -> int:
        """Number of tokens with stored KV; those that are on their way are not stored yet."""
        held = self._state.running_set.num_tokens_held
        for batch in self._batches:
            held -= sum(_is_here(seq, admission) for seq, admission in batch.decodes)
            held -= sum(
                chunk.num_tokens for chunk, admission in batch.chunks if _is_here(chunk.seq, admission)
            )
        return held

    def plan(self, now: float) -> StepPlan | None:
        """Returns the next batch, as `EngineCore.plan` does; None while `is_full`."""
        if self.is_full:
            return None
        plan = super().plan(now)
        if plan is not None:
            plan.horizon = 1
            plan.index = self.num_iterations + len(self._batches)
        return plan

    def depart(self, plan: StepPlan) -> None:
        """Puts the plan that was returned last in batch, as it is run now."""
        idle = set(plan.idle)
        decodes = [seq for seq in plan.decoding if seq not in idle]
        plan.decoding, plan.idle = decodes, ()
        batch = _Batch(
            plan,
            [(seq, seq.admission) for seq in decodes],
            [(chunk, chunk.seq.admission) for chunk in plan.chunks],
        )
        self._in_flight = None
        self._batches.append(batch)
        for seq in decodes:
            self.running_set.depart(seq)
        for chunk in plan.chunks:
            chunk.seq.stored_computed = chunk.num_cached + chunk.num_tokens
            if chunk.completes:
                self.running_set.depart(chunk.seq)

    def commit(self, plan: StepPlan, outcome: StepOutcome, now: float) -> Progress:
        """Applies the outcome of the plan that has been in flight longest, as `EngineCore.commit` does.

        Sequences that were aborted or preempted on the way are not touched.
        """
        if not self._batches or plan is not self._batches[0].plan or outcome.iterations != 1:
            raise ValueError("commit: must be of one iteration of the plan that is in flight longest")
        if not now >= self._now:
            self._refuse_past(now)
        batch = self._batches.popleft()
        pool = self.block_pool
        self._now = pool.now = self._state.last_end_s = now
        for on_commit in self._on_commit:
            on_commit(plan, 1, now)
        self.num_iterations = pool.num_iterations = self.num_iterations + 1
        running_set = self.running_set
        finished = [
            seq
            for seq, admission in batch.decodes
            if seq.state is COMPUTING and seq.admission == admission and running_set.arrive(seq)
        ]
        finished += [
            seq
            for seq in plan.branched
            if seq.state is DECODING and self.branched.produce(seq, outcome.parents.get(seq.request_id))
        ]
        prefilled = self._commit_batch(batch, outcome, finished)
        if outcome.ended:
            self._note_ends(outcome.ended, finished)
        if finished:
            self._finish(finished)
        return prefilled, finished

    def _commit_batch(self, batch: _Batch, outcome: StepOutcome, finished: list[Sequence]) -> list[Sequence]:
        """Records the chunks of a batch as `_commit_chunks` does; returns the complete prefills."""
        prefilled = []
        for chunk, admission in batch.chunks:
            seq = chunk.seq
            if not _is_here(seq, admission):
                continue
            if self._state.notes_chunks:
                self.block_pool.computed(seq, chunk.num_cached + chunk.num_tokens)
            if not chunk.completes:
                continue
            self.running_set.prefill_again(seq)
            prefilled.append(seq)
            if self._end_prefill(seq, outcome):
                finished.append(seq)
        return prefilled

    def _may_compute_nothing(self) -> bool:
        """Returns whether a step without tokens is no error: what remains may be on its way."""
        return bool(self._batches) or super()._may_compute_nothing()

    def _num_readable(self, seq: Sequence) -> int:
        return self._step.num_readable(seq, None)


def _is_here(seq: Sequence, admission: int) -> bool:
    """Returns whether a sequence has run since that admission."""
    return seq.state in (COMPUTING, PREFILLING) and seq.admission == admission
