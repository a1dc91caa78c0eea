"""A scheduling policy: who is admitted first, and who is preempted first. Say here after which paper.

It sees, in `rank`: a sequence with its tokens known and computed, its request (arrival, priority, tenant,
deadline, prompt) and, with needs_predictor = True, a predicted length. It never sees the true length, nor a
clock.
It may, in `before_step` (see policies/scheduling/__init__.py): preempt, pause, resume, rerank, and bound
the horizon with step.hold(). `on_commit` tells what was served, `on_end` that a sequence has gone.
It must promise: the same rank whenever asked in the same state. A rank is asked for at intake and after
each preemption; where it changes in between, the policy calls step.rerank(seq) and holds the step until
then.

Memory pressure: the largest rank, here the longest prompt, loses its KV.
Horizon: the order never changes by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.core.sequence_view import SequenceView
from policies.scheduling import Scheduling


@dataclass(frozen=True, kw_only=True, slots=True)
class MyPolicy(Scheduling):
    """The shortest prompts first, in classes; within a class first come, first served."""

    # Settings are the fields, with their defaults; preemption_mode is inherited. What a policy remembers is a
    # field, too: field(init=False, default_factory=dict, repr=False, compare=False), emptied by on_end.
    class_tokens: int = 512
    """Prompts up to this length are of the first class, up to twice this length of the second, and so on."""

    def __post_init__(self) -> None:
        Scheduling.__post_init__(self)
        if self.class_tokens < 1:
            raise ValueError(f"class_tokens={self.class_tokens}: must be >= 1 token")

    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """(class, arrival): the smallest goes first. Ties go by request id."""
        return ((seq.num_prompt_tokens - 1) // self.class_tokens, seq.request.arrival_s)
