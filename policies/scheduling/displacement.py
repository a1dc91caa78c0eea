"""Preempts running sequences for a waiting one, for policies with preemptive order.

A step that preempts admits no sequence: the waiting one is admitted in the next step.
Horizon: while a plan is repeated, the sum of free blocks and of the victims' blocks only decreases. So a
waiting sequence for which no room can be made remains without room, but free room may vanish: until the first
waiting sequence is admitted, every step is decided again.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from policies.core.sequence import ACTIVE_STATES, SequenceView
from policies.core.step import StepBuilder
from policies.core.view import StepView


def displaceable(seqs: Iterable[SequenceView]) -> list[SequenceView]:
    """Returns the sequences that can be preempted, largest rank first; those in KV transfers cannot."""
    able = [seq for seq in seqs if seq.state in ACTIVE_STATES]
    return sorted(able, key=lambda seq: (seq.rank, seq.request_id), reverse=True)


def displace(
    view: StepView, step: StepBuilder, head: SequenceView, victims: SequenceOf[SequenceView]
) -> None:
    """Preempts victims in order until the waiting sequence `head` fits; none if it would not fit at all.

    head: must be one that may start (`StepView.may_start`): a preemption gives it no adapter.
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
