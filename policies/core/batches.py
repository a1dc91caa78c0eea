"""The batches of a pipeline: they are planned while others are still on their way through its stages.

    plan a    plan b    plan c         commit a    plan d     ...
    a: 1 3    b: 2      c: chunk of 4              d: 1 3 and whatever waits

Up to max_batches plans are in flight, and they are committed in their order. A sequence that awaits a token
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
from typing import NamedTuple

from policies.core.parts import Engine
from policies.core.plan import Chunk, Progress, StepOutcome, StepPlan
from policies.core.sequence import COMPUTING, DECODING, PREFILLING, Sequence


class _Batch(NamedTuple):
    """A plan in flight; each sequence with the number of its admission, which a preemption ends."""

    plan: StepPlan
    decodes: list[tuple[Sequence, int]]
    chunks: list[tuple[Chunk, int]]


class Batches:
    """The plans of an engine that are in flight, the oldest first.

    Every plan must be followed by `depart`, when it is run; then the next may be asked for, until `is_full`.
    """

    def __init__(self, core: Engine, max_batches: int) -> None:
        self._core = core
        self._max_batches = max_batches
        self.in_flight: deque[_Batch] = deque()

    @property
    def is_full(self) -> bool:
        """True if no batch may be planned before one is committed."""
        return len(self.in_flight) >= (1 if self._core.may_branch else self._max_batches)

    @property
    def num_tokens_under_way(self) -> int:
        """Number of tokens that count as computed and are not stored yet."""
        num_tokens = 0
        for batch in self.in_flight:
            num_tokens += sum(_is_here(seq, admission) for seq, admission in batch.decodes)
            num_tokens += sum(
                chunk.num_tokens for chunk, admission in batch.chunks if _is_here(chunk.seq, admission)
            )
        return num_tokens

    def plan(self, now: float) -> StepPlan | None:
        """Returns the next batch; None while `is_full`."""
        if self.is_full:
            return None
        core = self._core
        plan = core.plan_step(now)
        if plan is not None:
            plan.horizon = 1
            plan.index = core.num_iterations + len(self.in_flight)
        return plan

    def depart(self, plan: StepPlan) -> None:
        """Puts the plan that was returned last in flight, as it is run now."""
        running_set = self._core.running_set
        idle = set(plan.idle)
        decodes = [seq for seq in plan.decoding if seq not in idle]
        plan.decoding, plan.idle = decodes, ()
        batch = _Batch(
            plan,
            [(seq, seq.admission) for seq in decodes],
            [(chunk, chunk.seq.admission) for chunk in plan.chunks],
        )
        self._core.at_rest()
        self.in_flight.append(batch)
        for seq in decodes:
            running_set.depart(seq)
        for chunk in plan.chunks:
            chunk.seq.stored_computed = chunk.num_cached + chunk.num_tokens
            if chunk.completes:
                running_set.depart(chunk.seq)

    def commit(self, plan: StepPlan, outcome: StepOutcome, now: float) -> Progress:
        """Applies the outcome of the plan that has been in flight longest, as `EngineCore.commit` does.

        Sequences that were aborted or preempted on the way are not touched.
        """
        core = self._core
        if not self.in_flight or plan is not self.in_flight[0].plan or outcome.iterations != 1:
            raise ValueError("commit: must be of one iteration of the plan that is in flight longest")
        core.check_time(now)
        batch = self.in_flight.popleft()
        core.on_committed(plan, now)
        running_set, branched = core.running_set, core.branched
        finished = [
            seq
            for seq, admission in batch.decodes
            if seq.state is COMPUTING and seq.admission == admission and running_set.arrive(seq)
        ]
        finished += [
            seq
            for seq in plan.branched
            if seq.state is DECODING and branched.produce(seq, outcome.parents.get(seq.request_id))
        ]
        prefilled = self._commit_chunks(batch, outcome, finished)
        if outcome.ended:
            core.note_ends(outcome.ended, finished)
        if finished:
            core.end_finished(finished)
        return prefilled, finished

    def _commit_chunks(self, batch: _Batch, outcome: StepOutcome, finished: list[Sequence]) -> list[Sequence]:
        """Records the chunks of a batch, and adds ends to `finished`; returns the complete prefills."""
        core = self._core
        prefilled = []
        for chunk, admission in batch.chunks:
            seq = chunk.seq
            if not _is_here(seq, admission):
                continue
            core.note_chunk(seq, chunk.num_cached + chunk.num_tokens)
            if not chunk.completes:
                continue
            core.running_set.prefill_again(seq)
            prefilled.append(seq)
            if core.end_prefill(seq, outcome):
                finished.append(seq)
        return prefilled


def _is_here(seq: Sequence, admission: int) -> bool:
    """Returns whether a sequence has run since that admission."""
    return seq.state in (COMPUTING, PREFILLING) and seq.admission == admission
