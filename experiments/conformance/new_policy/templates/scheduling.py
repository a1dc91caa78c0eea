"""Scheduling policy: decides which sequence is admitted first, and which preempted first. Name the paper.

It sees, in `rank`: a sequence with its known and computed tokens, its request (arrival, priority, tenant,
deadline, prompt) and, with needs_predictor = True, a predicted length. It never sees the true length or a
clock.
It may, in `before_step` (see policies/scheduling/__init__.py): preempt, pause, resume, rerank, and bound the
horizon with step.hold(). `on_commit` reports the tokens served, `on_end` the end of a sequence.
It must promise: equal states give equal ranks. A rank is computed when a sequence enters and after each
preemption. If it changes in between, the policy calls step.rerank(seq) then, and holds the step until then.

Memory pressure: the sequence of largest rank, here the longest prompt, loses its KV.
Horizon: the order never changes by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fieldlimits import PositiveInt, Unit
from policies.core.sequence import SequenceView
from policies.scheduling import Scheduling


@dataclass(frozen=True, kw_only=True, slots=True)
class MyPolicy(Scheduling):
    """Shortest prompts first, in classes of length; within a class, first come, first served."""

    # Settings are the fields, with their defaults; preemption_mode is inherited. State of the policy is a
    # field, too: field(init=False, default_factory=dict, repr=False, compare=False), cleared by on_end.
    class_tokens: Annotated[PositiveInt, Unit("token")] = 512
    """Prompts up to this length are in the first class, up to twice this length in the second, and so on."""

    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Returns (class, arrival time); the smallest rank goes first, ties are broken by request id."""
        return ((seq.num_prompt_tokens - 1) // self.class_tokens, seq.request.arrival_s)
