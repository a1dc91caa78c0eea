"""The interface of scheduling policies, which order admissions and preemptions. One policy per file."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar

from fieldlimits import Checked, OneOf
from policies.core.plan import StepPlan
from policies.core.sequence import SequenceView
from policies.core.step import StepBuilder
from policies.core.view import StepView
from policies.core.waiting_queue import WaitingQueue

PREEMPTION_MODES = ("recompute", "swap")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheduling(Checked):
    """An order of sequences: the smallest rank is admitted first, the largest rank is preempted first.

    A policy defines `rank`; the other methods are for policies with an order that depends on the service so
    far. Such a policy keeps its state in fields with init=False, by request id or tenant, and deletes it in
    `on_end`.
    """

    needs_predictor: ClassVar[bool] = False
    """Whether the policy reads `Sequence.num_predicted_tokens`."""
    preempts_newest: ClassVar[bool] = False
    """Whether the sequence that was admitted last is preempted first, in place of the one of largest rank."""
    has_classes: ClassVar[bool] = False
    """Whether it orders by priority classes, as vLLM's `--scheduling-policy priority`."""
    looks_up: ClassVar[bool] = False
    """Whether the policy looks up the cached prefixes of waiting sequences, which marks them as used."""
    starvation_bound: ClassVar[int | None] = None
    """Number of later requests that may be admitted before a waiting one; None: no limit."""

    preemption_mode: Annotated[str, OneOf(PREEMPTION_MODES)] = "recompute"
    """Handling of a preempted sequence's KV: recompute frees it, swap moves it to host memory if possible."""

    @property
    def starvation_bound_s(self) -> float | None:
        """Time in seconds within which later requests may be admitted before a waiting one; None: no limit.

        Like starvation_bound it applies to the first admission and to batching policies that keep the order.
        """
        return None

    @abstractmethod
    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Returns the sort key of a sequence; ties are broken by request id.

        Is called when the sequence is added, after a preemption, and by `StepBuilder.rerank`.
        """
        raise NotImplementedError

    def chunk_rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Returns the sort key of a sequence in `StepView.prefilling`; without this method: by admission.

        The order must not change when each sequence gets its next chunk, or `before_step` must call hold(1).
        """
        raise NotImplementedError

    def queue(self) -> WaitingQueue:
        """Returns an empty waiting queue."""
        return WaitingQueue()

    def before_step(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Acts before the batching policy: preempts, pauses, resumes, reranks, or limits the horizon."""

    def on_commit(self, plan: StepPlan, num_iterations: int, now: float) -> None:
        """Is called when a plan was run num_iterations times, before its sequences advance."""

    def on_end(self, seq: SequenceView) -> None:
        """Is called when a sequence has ended or was aborted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StarvationTraits:
    """Promises of a policy of any family on how many later requests go first; see `Scheduling`."""

    starvation_bound: int | None = None
    starvation_bound_s: float | None = None


def overrides(scheduling: Scheduling, name: str) -> bool:
    """Returns whether a policy overrides an optional method."""
    return getattr(type(scheduling), name) is not getattr(Scheduling, name)
