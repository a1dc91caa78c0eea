"""Longest prefix first: the request with the longest prefix cache hit is first (SGLang's `lpm`).

Assumes a prefix cache. Requests that share a prefix run one after the other while it is cached, which
approximates a depth-first traversal of the radix tree. A request without a shared prefix may starve, unless
max_wait_s limits that, as in shortest_job_first (not in SGLang). With more than max_sorted waiting requests
the order is that of arrival, as in SGLang, because looking up all of them takes too long.
Memory pressure: the sequence with the shortest hit at its admission is preempted. Horizon: one iteration
while a request waits, because evictions change the hits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from policies.core.sequence import SequenceState
from policies.core.sequence_view import SequenceView
from policies.core.step import StepBuilder
from policies.core.view import StepView
from policies.scheduling import Scheduling
from policies.scheduling.overdue import Overdue, check_max_wait_s


@dataclass(frozen=True, kw_only=True, slots=True)
class LongestPrefix(Scheduling):
    """The longest prefix hit is first; ties are broken by arrival."""

    max_sorted: int = 128
    """Number of waiting requests above which the order is first come, first served."""
    max_wait_s: float | None = None
    """Seconds since its arrival after which a waiting request is served before all others; null: never."""

    _num_found: dict[int, int] = field(init=False, default_factory=dict, repr=False, compare=False)
    _by_hit: dict[int, SequenceView] = field(init=False, default_factory=dict, repr=False, compare=False)
    _overdue: Overdue = field(init=False, default_factory=Overdue, repr=False, compare=False)

    def __post_init__(self) -> None:
        Scheduling.__post_init__(self)
        if self.max_sorted < 1:
            raise ValueError(f"max_sorted={self.max_sorted}: must be >= 1 request")
        check_max_wait_s(self.max_wait_s)

    @property
    def starvation_bound_s(self) -> float | None:
        """Equal to max_wait_s."""
        return self.max_wait_s

    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Returns the sort key: (0, arrival) if overdue, else (1, -tokens of the hit, arrival)."""
        num_found = self._num_found.get(seq.request_id, 0)
        if num_found and seq.state is SequenceState.waiting:
            self._by_hit[seq.request_id] = seq
        return self._overdue.rank(seq, self.max_wait_s, -num_found)

    def before_step(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Moves overdue requests to the front, and looks up the prefix hits of all waiting requests."""
        self._overdue.bring_forward(view, step, now)
        if not view.num_waiting:
            return
        step.hold(1)
        if view.num_waiting > self.max_sorted:
            self._order_by_arrival(step)
            return
        for seq in sorted(view.waiting, key=lambda seq: seq.request_id):
            self._note_hit(seq, view.num_found(seq), step)

    def on_end(self, seq: SequenceView) -> None:
        """Removes a sequence that has ended."""
        self._num_found.pop(seq.request_id, None)
        self._by_hit.pop(seq.request_id, None)
        self._overdue.forget(seq)

    def _order_by_arrival(self, step: StepBuilder) -> None:
        """Forgets the hits of waiting sequences; the others have none, so they need not be visited."""
        for seq in list(self._by_hit.values()):
            if seq.state is SequenceState.waiting:
                self._note_hit(seq, 0, step)
        self._by_hit.clear()

    def _note_hit(self, seq: SequenceView, num_found: int, step: StepBuilder) -> None:
        """Ranks a waiting sequence again if its hit has changed."""
        if num_found != self._num_found.get(seq.request_id, 0):
            self._num_found[seq.request_id] = num_found
            step.rerank(seq)
