"""Classes of requests: by priority, or online requests before batch requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Annotated, ClassVar

from fieldlimits import Ge, Gt, Unit
from policies.core.request import Request
from policies.core.sequence import SequenceView
from policies.core.step import StepBuilder
from policies.core.view import StepView
from policies.scheduling import Alarms, Scheduling, displace, displaceable


@dataclass(frozen=True, kw_only=True, slots=True)
class Priority(Scheduling):
    """The smallest `Request.priority` is admitted first, the largest is preempted first.

    Strict: first come, first served within a class; requests may starve if higher classes keep the engine
    busy. With aging a request moves up one class per aging_s seconds of waiting, as in operating systems. All
    requests move up at the same rate, so their order never changes and follows priority x aging_s + arrival:
    no request waits for requests that arrive more than aging_s per class after it.
    Memory pressure: the running sequence of largest rank is preempted. Horizon: the order never changes.
    """

    has_classes: ClassVar[bool] = True

    aging_s: Annotated[float | None, Gt(0), Unit("s"), "null for strict classes"] = None
    """Waiting time in seconds equivalent to one class; null: no aging."""

    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Returns the sort key: (priority, arrival), or with aging their weighted sum."""
        request = seq.request
        if self.aging_s is None:
            return (request.priority, request.arrival_s)
        return (request.priority * self.aging_s + request.arrival_s,)


_ONLINE, _BATCH = 0, 1


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineBatch(Scheduling):
    """Online requests are served before batch requests; batch sequences are preempted first.

    Online requests and a batch API on one engine: batch requests use the capacity that online requests leave.

    A batch request has a priority of at least batch_priority, or a deadline_s (a completion window of hours).
    Online requests are served before batch requests, in order of arrival; batch requests by deadline and
    arrival. An online request without a slot or memory preempts batch sequences, the latest deadline first,
    as ConServe (Qiao et al., 2024) and HyGen (Sun et al., 2025) do; their latency models are not part of this
    policy. A batch request that still waits promote_before_s before its deadline counts as online from then
    on. Batch requests without a deadline may starve behind online requests. Memory pressure: batch sequences
    are preempted first, the latest deadline first, then the last arrivals. Horizon: while a request waits,
    until the next promotion; one iteration while an online request has room but no budget.
    """

    batch_priority: int = 1
    """Smallest priority of batch requests; requests with a deadline are also batch requests."""
    promote_before_s: Annotated[float, Ge(0), Unit("s")] = 600.0
    """Seconds before its deadline at which a waiting batch request becomes an online one."""
    preempts: bool = True
    """Whether a waiting online request preempts batch sequences; if not, it waits until one ends."""

    _promoted: set[int] = field(init=False, default_factory=set, repr=False, compare=False)
    _noted: set[int] = field(init=False, default_factory=set, repr=False, compare=False)
    _alarms: Alarms = field(init=False, default_factory=Alarms, repr=False, compare=False)

    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Returns the sort key: (0, arrival) if online, (1, deadline, arrival) if in the batch class."""
        request = seq.request
        if not self._is_batch(request) or seq.request_id in self._promoted:
            return (_ONLINE, request.arrival_s)
        if request.deadline_s is None:
            return (_BATCH, inf, request.arrival_s)
        if seq.request_id not in self._noted:
            self._noted.add(seq.request_id)
            self._alarms.set(request.deadline_s - self.promote_before_s, seq)
        return (_BATCH, request.deadline_s, request.arrival_s)

    def before_step(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Promotes requests close to their deadline, and preempts batch sequences for online requests."""
        for seq in self._alarms.pop_due(now):
            self._promoted.add(seq.request_id)
            step.rerank(seq)
        head = next(iter(view.waiting), None)
        if head is None:
            return
        step.hold(until_s=self._alarms.next_s)
        if self.preempts and head.rank[0] == _ONLINE:
            displace(view, step, head, displaceable(seq for seq in view.running if seq.rank[0] == _BATCH))

    def on_end(self, seq: SequenceView) -> None:
        """Removes a sequence that has ended."""
        self._promoted.discard(seq.request_id)
        self._noted.discard(seq.request_id)

    def _is_batch(self, request: Request) -> bool:
        return request.priority >= self.batch_priority or request.deadline_s is not None
