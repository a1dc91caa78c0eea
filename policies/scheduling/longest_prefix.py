"""Longest prefix first: the request with the longest prefix hit goes first (SGLang's `lpm`).

Assumes a cache that finds prefixes. Requests that share a prefix run one after the other while it is still
cached, which approximates a depth-first walk of the radix tree. A request that shares nothing may starve,
unless max_wait_s bounds that, as in shortest_job_first (not in SGLang). With more than max_sorted waiting
requests the order is that of arrival, as in SGLang, since looking all of them up costs too much.
Memory pressure: the sequence with the shortest hit at its admission is preempted. Horizon: one iteration
while a request waits, since evictions change the hits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from policies.core.sequence_view import SequenceView
from policies.core.step import StepBuilder
from policies.core.view import StepView
from policies.scheduling import Scheduling
from policies.scheduling.overdue import Overdue, check_max_wait_s


@dataclass(frozen=True, kw_only=True, slots=True)
class LongestPrefix(Scheduling):
    """The longest prefix hit first, ties by arrival."""

    max_sorted: int = 128
    """Number of waiting requests above which the order is first come, first served."""
    max_wait_s: float | None = None
    """Time since its arrival after which a waiting request goes before all others; null: never."""

    _num_found: dict[int, int] = field(init=False, default_factory=dict, repr=False, compare=False)
    _overdue: Overdue = field(init=False, default_factory=Overdue, repr=False, compare=False)

    def __post_init__(self) -> None:
        Scheduling.__post_init__(self)
        if self.max_sorted < 1:
            raise ValueError(f"max_sorted={self.max_sorted}: must be >= 1 request")
        check_max_wait_s(self.max_wait_s)

    @property
    def starvation_bound_s(self) -> float | None:
        """The bound is max_wait_s."""
        return self.max_wait_s

    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Sort key (0, arrival) if it is overdue, else (1, -tokens found, arrival)."""
        return self._overdue.rank(seq, self.max_wait_s, -self._num_found.get(seq.request_id, 0))

    def before_step(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Moves overdue requests to the front, and looks up the prefix hits of all waiting requests."""
        self._overdue.bring_forward(view, step, now)
        if not view.num_waiting:
            return
        step.hold(1)
        sorts = view.num_waiting <= self.max_sorted
        for seq in sorted(view.waiting, key=lambda seq: seq.request_id):
            num_found = view.num_found(seq) if sorts else 0
            if num_found != self._num_found.get(seq.request_id, 0):
                self._num_found[seq.request_id] = num_found
                step.rerank(seq)

    def on_end(self, seq: SequenceView) -> None:
        """Forgets a sequence that has ended."""
        self._num_found.pop(seq.request_id, None)
        self._overdue.forget(seq)
