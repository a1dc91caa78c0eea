"""Scheduling policies: which sequence goes first, which is preempted, and how. One policy per file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.core.plan import StepPlan
from policies.core.sequence_view import SequenceView
from policies.core.step import StepBuilder
from policies.core.view import StepView
from policies.core.waiting import WaitingQueue

PREEMPTION_MODES = ("recompute", "swap")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheduling:
    """An order of sequences: the smallest rank is admitted first, the largest rank is preempted first.

    A policy defines `rank`; the other methods are for policies whose order depends on what has been served.
    Such a policy keeps its memory in fields with init=False, by request id or tenant, and deletes it in
    `on_end`.
    """

    needs_predictor: ClassVar[bool] = False
    """Whether the policy reads `Sequence.num_predicted_tokens`."""
    starvation_bound: ClassVar[int | None] = None
    """Number of later requests that may be admitted before a waiting one; None: nothing is promised."""

    preemption_mode: str = "recompute"
    """What happens to a victim's KV: recompute frees it, swap moves it to host memory while there is room."""

    def __post_init__(self) -> None:
        if self.preemption_mode not in PREEMPTION_MODES:
            raise ValueError(f"preemption_mode={self.preemption_mode}: must be recompute or swap")

    @property
    def starvation_bound_s(self) -> float | None:
        """A waiting request is overtaken only by requests that arrive within this time; None: no promise.

        Like starvation_bound, counted to the first admission, with a batching policy that keeps the order.
        """
        return None

    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Sort key of a sequence; called when it is added, after a preemption, and by `StepBuilder.rerank`.

        Ties are broken by request id.
        """
        raise NotImplementedError

    def chunk_rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Sort key of a prefill under way in `StepView.prefilling`; without it, they come by admission.

        It must order them the same way after each has got its next chunk, or `before_step` must call hold(1).
        """
        raise NotImplementedError

    def queue(self) -> WaitingQueue:
        """Returns an empty waiting queue."""
        return WaitingQueue()

    def before_step(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Acts before the batching policy does: preempts, pauses, resumes, reranks, or bounds the horizon."""

    def on_commit(self, plan: StepPlan, num_iterations: int, now: float) -> None:
        """Called when a plan was run num_iterations times; its sequences have not advanced yet."""

    def on_end(self, seq: SequenceView) -> None:
        """Called when a sequence has ended or was aborted."""


def overrides(scheduling: Scheduling, name: str) -> bool:
    """Whether a policy overrides an optional method."""
    return getattr(type(scheduling), name) is not getattr(Scheduling, name)
