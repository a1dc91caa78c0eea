"""The engine's interface for its parts, and its smallest part: the batches of a pipeline.

The other parts are late ends and static batches (`endings.py`), and draft tokens
(`policies/speculation/engine/`).

The batches of a pipeline are planned while others are still in its stages.

    plan a    plan b    plan c         commit a    plan d     ...
    a: 1 3    b: 2 c: chunk of 4 d: 1 3 and waiting requests

Up to max_batches plans are in flight, and they are committed in their order. A sequence that awaits a token
is in one batch only: no later plan decodes it, preempts it or counts it as decoding until that batch is
committed. Groups of sequences therefore circulate in the pipeline. The chunks of one prompt need no token, so
consecutive batches can hold consecutive chunks: a planned chunk counts as computed. This is what vLLM's
scheduler does with pipeline parallelism (vllm 0.32, `step_with_batch_queue` with one batch per stage): the
next batch is scheduled as soon as there is room, and takes everything that is not in flight. A batch is not
cut into micro-batches, so sequences that were prefilled together stay together.

max_batch_seqs limits the sequences of a batch, as SGLang's pp_max_micro_batch_size does: SGLang has one batch
of requests per stage, each with its share of the slots.
While a request has branches, only one batch is in flight.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Protocol

from policies.caching.pool import BlockPool
from policies.core.branch_set import BranchSet
from policies.core.plan import Chunk, Progress, StepOutcome, StepPlan
from policies.core.running_set import RunningSet
from policies.core.sequence import COMPUTING, DECODING, PREFILLING, FinishReason, Sequence
from policies.core.step import StepBuilder
from policies.core.view import StepView


class DraftReader(Protocol):
    """The verification of draft tokens, as far as other parts use it."""

    def note_read(self, has_read: bool) -> None:
        """Sets whether the tokens of the step in flight have been read, while sequences leave."""
        ...


class Engine(Protocol):
    """`policies.core.engine.EngineCore`, as its parts use it."""

    block_pool: BlockPool
    running_set: RunningSet
    running: dict[int, Sequence]
    step: StepBuilder
    view: StepView
    now: float
    wake_s: float
    may_branch: bool
    num_held: int
    num_discarded: int
    num_iterations: int
    num_reserved: int

    @property
    def drafts(self) -> DraftReader | None:
        """The verification of draft tokens; None: each decode is one token."""
        ...

    @property
    def branched(self) -> BranchSet:
        """Sequences that decode with branches."""
        ...

    @property
    def in_flight(self) -> StepPlan | None:
        """The last returned plan, while it is not committed."""
        ...

    @property
    def num_in_engine(self) -> int:
        """Number of waiting and running sequences, those with a complete output included."""
        ...

    def plan_step(self, now: float) -> StepPlan | None:
        """Returns the next step like `plan`, but ignores drafts and other plans in flight."""
        ...

    def plan_once(self, now: float) -> StepPlan | None:
        """Returns the next step while complete sequences hold their slots."""
        ...

    def commit_step(self, plan: StepPlan, outcome: StepOutcome, now: float) -> Progress:
        """Applies the outcome of a plan like `commit`, but ignores drafts and other plans in flight."""
        ...

    def apply(self, plan: StepPlan, outcome: StepOutcome, now: float) -> Progress:
        """Applies the outcome of a plan after earlier ended sequences have left."""
        ...

    def cancel(self, plan: StepPlan) -> list[Sequence]:
        """Cancels the plan in flight; aborts its sequences and returns them."""
        ...

    def check_commit(self, plan: StepPlan, num_iterations: int, now: float) -> None:
        """Raises ValueError for a commit that does not fit the plan in flight."""
        ...

    def check_time(self, now: float) -> None:
        """Raises ValueError if time goes backwards."""
        ...

    def on_committed(self, plan: StepPlan, now: float) -> None:
        """Counts one committed iteration, and notifies policies, before its outcome is applied."""
        ...

    def at_rest(self) -> None:
        """Allows the next plan although the last one has not been committed."""
        ...

    def note_chunk(self, seq: Sequence, num_computed: int) -> None:
        """Notifies the pool of a computed chunk, if it listens."""
        ...

    def note_ends(self, ended: tuple[Sequence, ...], finished: list[Sequence]) -> None:
        """Adds the sequences that the executor reports as ended to `finished`."""
        ...

    def end_prefill(self, seq: Sequence, outcome: StepOutcome) -> bool:
        """Adds the first token of a sequence, or of each of its branches; returns whether it has ended."""
        ...

    def end_finished(self, finished: list[Sequence]) -> None:
        """Ends sequences in the order of admission."""
        ...

    def finish(self, seq: Sequence, reason: FinishReason, num_planned: int = 0) -> None:
        """Ends a running sequence now; num_planned tokens of the plan in flight will not be computed."""
        ...

    def withdraw(self, seq: Sequence, reason: FinishReason) -> None:
        """Ends a sequence that the plan in flight has preempted."""
        ...

    def free_ending(self) -> None:
        """Frees the sequences that ended with the previous step, if they hold slots."""
        ...


class _Batch(NamedTuple):
    """A plan in flight. Each sequence is stored with its admission number, which a preemption invalidates."""

    plan: StepPlan
    decodes: list[tuple[Sequence, int]]
    chunks: list[tuple[Chunk, int]]


class Batches:
    """The plans of an engine that are in flight, the oldest first.

    Call `depart` when a plan starts to run; then the next one may be planned, until `is_full`.
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
        """Number of tokens that count as computed but are not stored yet."""
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
        """Marks the last returned plan as in flight, because it starts to run."""
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

        Sequences that were aborted or preempted while it ran are not touched.
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
    """Returns whether a sequence has stayed admitted since that admission."""
    return seq.state in (COMPUTING, PREFILLING) and seq.admission == admission
