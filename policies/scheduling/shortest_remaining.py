"""Shortest remaining processing time first (SRPT; Schrage, 1968) by predicted output tokens, preemptive.

Remaining: predicted minus produced tokens. A prediction that is outgrown is doubled: an answer predicted at
10 tokens counts as one of 20 from its 10th token on, and may then have to give way (S3's correction; the
estimate never runs down to nothing, which would make a long answer unpreemptable, the known weakness of SRPT
under wrong sizes).
A waiting sequence that finds no slot or no memory preempts running ones that have over min_gain_tokens
more to go, the longest first, if that makes enough room. What it costs to bring the preempted back is not
weighed; min_gain_tokens stands for it. Long answers starve while shorter ones keep coming.
Memory pressure: the longest remaining goes. Horizon: until the first running answer outgrows its prediction,
while somebody waits; step by step while a sequence that may displace others has room but no budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.scheduling import Scheduling
from policies.scheduling.displacement import displace, displaceable
from policies.scheduling.expectation import remaining_output_tokens
from policies.sequence import Sequence
from policies.step import StepBuilder, StepView


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortestRemaining(Scheduling):
    """The fewest tokens to go are admitted first; the most are preempted first, also for one who waits."""

    needs_predictor: ClassVar[bool] = True

    min_gain_tokens: int = 64
    """A running sequence gives way only to one that has more than so many tokens less to go."""

    def __post_init__(self) -> None:
        Scheduling.__post_init__(self)
        if self.min_gain_tokens < 0:
            raise ValueError(f"min_gain_tokens={self.min_gain_tokens}: must be >= 0")

    def rank(self, seq: Sequence) -> tuple[float, ...]:
        """(output tokens still expected, arrival)."""
        return (remaining_output_tokens(seq), seq.request.arrival_s)

    def before_step(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Count again what the running have to go, and let those give way that have too much."""
        running = view.running
        for seq in running:
            step.rerank(seq)
        head = next(iter(view.waiting), None)
        if head is None or not running:
            return
        step.hold(int(min(seq.rank[0] for seq in running)))
        limit = head.rank[0] + self.min_gain_tokens
        displace(view, step, head, displaceable(seq for seq in running if seq.rank[0] > limit))
