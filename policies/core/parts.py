"""The interface of an engine for its parts: late ends, static batches, pipelines and draft tokens."""

from __future__ import annotations

from typing import Protocol

from policies.caching.pool import BlockPool
from policies.core.branch_set import BranchSet
from policies.core.plan import Progress, StepOutcome, StepPlan
from policies.core.running_set import RunningSet
from policies.core.sequence import FinishReason, Sequence
from policies.core.step import StepBuilder
from policies.core.view import StepView


class DraftReader(Protocol):
    """The verification of draft tokens, as far as other parts use it."""

    def note_read(self, has_read: bool) -> None:
        """Says whether the tokens of the step in flight have been read, while sequences leave."""
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
        """The plan that was returned last and is not committed yet."""
        ...

    @property
    def num_in_engine(self) -> int:
        """Number of waiting and running sequences, those with a complete output included."""
        ...

    def plan_step(self, now: float) -> StepPlan | None:
        """Returns the next step as `plan` does, without drafts and other plans in flight."""
        ...

    def plan_once(self, now: float) -> StepPlan | None:
        """Returns the next step while complete sequences hold their slots."""
        ...

    def commit_step(self, plan: StepPlan, outcome: StepOutcome, now: float) -> Progress:
        """Applies the outcome of a plan as `commit` does, without drafts and other plans in flight."""
        ...

    def apply(self, plan: StepPlan, outcome: StepOutcome, now: float) -> Progress:
        """Applies the outcome of a plan after earlier sequences have left."""
        ...

    def cancel(self, plan: StepPlan) -> list[Sequence]:
        """Cancels the plan in flight; aborts its sequences and returns them."""
        ...

    def check_commit(self, plan: StepPlan, num_iterations: int, now: float) -> None:
        """Raises ValueError for a commit that does not fit the plan in flight."""
        ...

    def check_time(self, now: float) -> None:
        """Raises ValueError if time goes back."""
        ...

    def on_committed(self, plan: StepPlan, now: float) -> None:
        """Counts one committed iteration, and notifies policies, before its outcome is applied."""
        ...

    def at_rest(self) -> None:
        """Lets the next plan be asked for, although the last one has not been committed."""
        ...

    def note_chunk(self, seq: Sequence, num_computed: int) -> None:
        """Tells the pool that a chunk is computed, if it wants to know."""
        ...

    def note_ends(self, ended: tuple[Sequence, ...], finished: list[Sequence]) -> None:
        """Adds the sequences that the executor reports as ended to `finished`."""
        ...

    def end_prefill(self, seq: Sequence, outcome: StepOutcome) -> bool:
        """Gives a sequence its first token, or its branches theirs; returns whether it has ended."""
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
        """Frees the sequences that have ended with the step before, if they hold slots."""
        ...
