"""Least slack first (least laxity; Dertouzos and Mok, 1989) against TTFT and TPOT deadlines.

The next token of a sequence is due at arrival + ttft_s + tpot_s x tokens produced. Its slack is the time from
now until then, less the time to compute what its next token needs: its uncomputed tokens at
prefill_tokens_per_s, an estimate that the user gives, as a policy knows no durations. `now` is the same for
all, so the order is that of the latest start, due - time to compute: it is fixed for a waiting sequence, and
moves away by tpot_s with every token of a running one.
A running answer that is far ahead of its reader has much slack: when the slack of the first waiting sequence
is used up and it finds no room, decodes whose latest start is more than margin_s behind its own are preempted
for it, the largest slack first. Prefills under way are not. No request starves: a waiting sequence keeps its
latest start, and later arrivals have later ones, within the range of ttft_s and of prompt lengths.
Memory pressure: the largest slack is preempted. Horizon: until the slack of the first waiting sequence is
used up; from then on, until a running one has got margin_s ahead of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.core.sequence_view import SequenceView
from policies.core.step import StepBuilder
from policies.core.view import StepView
from policies.scheduling import Scheduling
from policies.scheduling.displacement import displace, displaceable
from policies.scheduling.edf import by_priority, check_by_priority


@dataclass(frozen=True, kw_only=True, slots=True)
class LeastSlack(Scheduling):
    """The earliest latest start is admitted first, the latest is preempted first."""

    ttft_s: tuple[float, ...] = (1.0,)
    """TTFT targets in seconds for priority 0, 1, ...; the last holds for all beyond."""
    tpot_s: tuple[float, ...] = (0.1,)
    """TPOT targets in seconds, likewise."""
    prefill_tokens_per_s: float = 10_000.0
    """Estimated prefill rate of the engine in tokens per second."""
    margin_s: float = 1.0
    """Minimum slack in seconds that a decode must have above the waiting sequence to be preempted for it."""

    def __post_init__(self) -> None:
        Scheduling.__post_init__(self)
        for name in ("ttft_s", "tpot_s"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            check_by_priority(name, getattr(self, name))
        if not self.prefill_tokens_per_s > 0:
            raise ValueError(f"prefill_tokens_per_s={self.prefill_tokens_per_s}: must be > 0")
        if not self.margin_s >= 0:
            raise ValueError(f"margin_s={self.margin_s}: must be >= 0 s")

    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Sort key (latest start, arrival)."""
        request = seq.request
        due_s = request.arrival_s + by_priority(self.ttft_s, request)
        due_s += seq.num_output_tokens * by_priority(self.tpot_s, request)
        num_tokens = seq.num_uncomputed - seq.num_swapped
        return (due_s - num_tokens / self.prefill_tokens_per_s, request.arrival_s)

    def before_step(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Updates the slack of the running sequences.

        Makes room for a waiting sequence that has none left.
        """
        for seq in view.running:
            step.rerank(seq)
        head = next(iter(view.waiting), None)
        if head is None:
            return
        latest_s = head.rank[0]
        if latest_s > now:
            step.hold(until_s=latest_s)
            return
        limit_s = latest_s + self.margin_s
        ahead = []
        for seq in view.decoding:
            if seq.rank[0] > limit_s:
                ahead.append(seq)
            else:  # one iteration early rather than a rounding error late
                num_tokens = (limit_s - seq.rank[0]) / by_priority(self.tpot_s, seq.request)
                step.hold(max(1, int(min(num_tokens, 2**31))))
        displace(view, step, head, displaceable(ahead))
