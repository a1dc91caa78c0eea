"""Who goes first, who is preempted, and how. One policy a file."""

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

    A policy gives `rank`; the other methods are for those whose order depends on what has been served. What
    such a policy remembers lies in fields with init=False, by request id or tenant, and goes when `on_end`
    says so.
    """

    needs_predictor: ClassVar[bool] = False
    """Whether it asks for `Sequence.num_predicted_tokens`."""
    starvation_bound: ClassVar[int | None] = None
    """So many requests that came later may be admitted before one that waits; None: nothing is claimed."""

    preemption_mode: str = "recompute"
    """What becomes of a victim's KV: recompute frees it, swap moves it to host memory while there is room."""

    def __post_init__(self) -> None:
        if self.preemption_mode not in PREEMPTION_MODES:
            raise ValueError(f"preemption_mode={self.preemption_mode}: must be recompute or swap")

    @property
    def starvation_bound_s(self) -> float | None:
        """Who waits is overtaken only by requests that came within this time of it; None: nothing is claimed.

        Like starvation_bound, counted to the first admission, with a batching policy that keeps the order.
        """
        return None

    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Sort key of a sequence, asked at its intake, after a preemption, and by `StepBuilder.rerank`.

        Ties go by request id.
        """
        raise NotImplementedError

    def chunk_rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Sort key of a begun prefill in `StepView.prefilling`; not overridden, they come by admission.

        It must order them the same way after each has got its next chunk, or `before_step` must hold(1).
        """
        raise NotImplementedError

    def queue(self) -> WaitingQueue:
        """An empty queue for the waiting."""
        return WaitingQueue()

    def before_step(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Act before the batching policy does: preempt, pause, resume, rerank, bound the horizon."""

    def on_commit(self, plan: StepPlan, num_iterations: int, now: float) -> None:
        """A plan was run num_iterations times; its sequences have not advanced yet."""

    def on_end(self, seq: SequenceView) -> None:
        """A sequence has ended, or was aborted."""


def overrides(scheduling: Scheduling, name: str) -> bool:
    """Whether a policy has an optional method of its own."""
    return getattr(type(scheduling), name) is not getattr(Scheduling, name)
