"""The interface of scheduling policies, which order admissions and preemptions, and its helpers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import Annotated, ClassVar

from fieldlimits import Checked, OneOf
from policies.core.plan import StepPlan
from policies.core.sequence import ACTIVE_STATES, SequenceState, SequenceView
from policies.core.step import StepBuilder
from policies.core.view import StepView
from policies.core.waiting_queue import WaitingQueue

PREEMPTION_MODES = ("recompute", "swap")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheduling(Checked):
    """An order of sequences: the smallest rank is admitted first, the largest rank is preempted first.

    A policy defines `rank`; the other methods are for policies whose order depends on the service so far.
    Such a policy keeps its state in fields with init=False, by request id or tenant, and deletes it in
    `on_end`.
    """

    needs_predictor: ClassVar[bool] = False
    """Whether the policy reads `Sequence.num_predicted_tokens`."""
    preempts_newest: ClassVar[bool] = False
    """Whether the last admitted sequence is preempted first, instead of the one of largest rank."""
    has_classes: ClassVar[bool] = False
    """Whether it orders by priority classes, like vLLM's `--scheduling-policy priority`."""
    looks_up: ClassVar[bool] = False
    """Whether the policy looks up the cached prefixes of waiting sequences, which marks them as used."""
    starvation_bound: ClassVar[int | None] = None
    """Number of later requests that may be admitted before a waiting one; None: no limit."""

    preemption_mode: Annotated[str, OneOf(PREEMPTION_MODES)] = "recompute"
    """Handling of a preempted sequence's KV: recompute frees it, swap moves it to host memory if possible."""

    @property
    def starvation_bound_s(self) -> float | None:
        """Time in seconds within which later requests may be admitted before a waiting one; None: no limit.

        Like starvation_bound, it applies to the first admission, and only with batching policies that keep
        the order.
        """
        return None

    @abstractmethod
    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Returns the sort key of a sequence; ties are broken by request id.

        Is called when the sequence is added, after a preemption, and by `StepBuilder.rerank`.
        """
        raise NotImplementedError

    def chunk_rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Returns the sort key of a sequence in `StepView.prefilling`; without it, by admission.

        The order must not change when each sequence gets its next chunk, or `before_step` must call hold(1).
        """
        raise NotImplementedError

    def queue(self) -> WaitingQueue:
        """Returns an empty waiting queue."""
        return WaitingQueue()

    def before_step(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Acts before the batching policy: preempts, pauses, resumes, reranks, or limits the horizon."""

    def on_commit(self, plan: StepPlan, num_iterations: int, now: float) -> None:
        """Is called after a plan has run num_iterations times, before its sequences advance."""

    def on_end(self, seq: SequenceView) -> None:
        """Is called when a sequence has ended or was aborted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StarvationTraits:
    """A policy's promises about how many later requests go first; see `Scheduling`.

    Applies to any policy family.
    """

    starvation_bound: int | None = None
    starvation_bound_s: float | None = None


def overrides(scheduling: Scheduling, name: str) -> bool:
    """Returns whether a policy overrides an optional method."""
    return getattr(type(scheduling), name) is not getattr(Scheduling, name)


def displaceable(seqs: Iterable[SequenceView]) -> list[SequenceView]:
    """Returns the sequences that can be preempted, largest rank first; those in KV transfers cannot."""
    able = [seq for seq in seqs if seq.state in ACTIVE_STATES]
    return sorted(able, key=lambda seq: (seq.rank, seq.request_id), reverse=True)


def displace(
    view: StepView, step: StepBuilder, head: SequenceView, victims: SequenceOf[SequenceView]
) -> None:
    """Preempts victims in order until the waiting sequence `head` fits; none if it cannot fit.

    head: must be able to start (`StepView.may_start`), because a preemption does not load its adapter.

    Preempts running sequences for a waiting one, for policies with preemptive order.

    A step that preempts admits no sequence: the waiting one is admitted in the next step.
    Horizon: while a plan is repeated, the sum of free blocks and of the victims' blocks only decreases. A
    waiting sequence that cannot get room by preemption therefore stays without room, but free room may
    shrink: until the first waiting sequence is admitted, every step is decided again.
    """
    if not victims:
        return
    if view.has_room(head):
        step.hold(1)
        return
    if not view.would_have_room(head, victims):
        return
    for seq in victims:
        step.preempt(seq)
        if view.has_room(head):
            return


class Overdue:
    """Requests that still waited max_wait_s after their arrival; a request stays overdue until it ends.

    A policy calls `rank` in its own `rank`, `bring_forward` in `before_step`, and `forget` in `on_end`. A
    later request is not admitted before a waiting overdue one, so a request is overtaken only by requests
    that arrive within max_wait_s after it.

    Bounds the waiting time: requests that have waited max_wait_s are served before all others.

    A scheduling policy reconsiders sequences when their timers are due (`Alarms`).
    """

    def __init__(self) -> None:
        self._ids: set[int] = set()
        self._alarms = Alarms()
        self._watched: set[int] = set()  # ids with a pending alarm

    def rank(self, seq: SequenceView, max_wait_s: float | None, *key: float) -> tuple[float, ...]:
        """Returns the sort key, (0, arrival) if overdue, else (1, *key, arrival), and sets a timer."""
        arrival_s, request_id = seq.request.arrival_s, seq.request_id
        if request_id in self._ids:
            return (0, arrival_s)
        if max_wait_s is not None and seq.state is SequenceState.waiting and request_id not in self._watched:
            self._watched.add(request_id)
            self._alarms.set(arrival_s + max_wait_s, seq)
        return (1, *key, arrival_s)

    def bring_forward(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Moves overdue requests to the front; the step holds until the next request could be overdue."""
        for seq in self._alarms.pop_due(now):
            self._watched.discard(seq.request_id)
            if seq.state is SequenceState.waiting:  # otherwise it is ranked when it waits again
                self._ids.add(seq.request_id)
                step.rerank(seq)
        if view.num_waiting:
            step.hold(until_s=self._alarms.next_s)

    def forget(self, seq: SequenceView) -> None:
        """Removes a sequence that has ended."""
        self._ids.discard(seq.request_id)
        self._watched.discard(seq.request_id)


class Alarms:
    """A heap of timers by (time, request id). They are not cancelled: the policy must check each one."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, SequenceView]] = []  # time, request id, number, sequence
        self._num_set = 0

    def set(self, due_s: float, seq: SequenceView) -> None:
        """Sets a timer for a sequence at due_s."""
        self._num_set += 1
        heappush(self._heap, (due_s, seq.request_id, self._num_set, seq))

    def pop_due(self, now: float) -> list[SequenceView]:
        """Removes the timers due by now; returns their sequences in order, except those that have ended."""
        due = []
        while self.next_s <= now:
            due.append(heappop(self._heap)[3])
        return due

    @property
    def next_s(self) -> float:
        """Time of the next timer in seconds; infinite if there is none."""
        heap = self._heap
        while heap and heap[0][3].state is SequenceState.ended:
            heappop(heap)
        return heap[0][0] if heap else inf
