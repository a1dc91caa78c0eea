"""Displacement of running sequences by a waiting one, for policies with preemptive order.

A step that preempts admits no sequence: the waiting one is admitted in the next step.
Horizon: free blocks and the blocks of the victims only shrink together while a plan repeats. So the answer
whether room could be made never turns from no to yes, but room that is there and not used yet may vanish:
until the head of the queue is admitted, every step is decided anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from policies.core.sequence import ACTIVE_STATES
from policies.core.sequence_view import SequenceView
from policies.core.step import StepBuilder
from policies.core.view import StepView


def displaceable(seqs: Iterable[SequenceView]) -> list[SequenceView]:
    """Running sequences that can be preempted, largest rank first; excludes those whose KV is being moved."""
    able = [seq for seq in seqs if seq.state in ACTIVE_STATES]
    return sorted(able, key=lambda seq: (seq.rank, seq.request_id), reverse=True)


def displace(
    view: StepView, step: StepBuilder, head: SequenceView, victims: SequenceOf[SequenceView]
) -> None:
    """Preempts victims in order until the waiting sequence `head` has room; none if all are not enough."""
    if not victims:
        return
    if view.has_room(head):
        step.hold(1)
        return
    missing = view.num_blocks_to_admit(head) - view.num_free_blocks
    for seq in victims:
        if missing <= 0:
            break
        missing -= view.num_blocks_held(seq)
    if missing > 0:
        return
    for seq in victims:
        step.preempt(seq)
        if view.has_room(head):
            return
