"""How a waiting sequence takes the place of running ones, for the policies that want this.

A step that preempts admits nobody: the one who waits comes in with the next step.
Horizon: free blocks and what the victims hold only shrink together while a plan repeats. So whether room
could be made never turns from no to yes, but room that is there and not used yet may go: until the head of
the queue is in, every step is decided anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from policies.core.sequence import AT_WORK
from policies.core.sequence_view import SequenceView
from policies.core.step import StepBuilder
from policies.core.view import StepView


def displaceable(seqs: Iterable[SequenceView]) -> list[SequenceView]:
    """Those of the running that can be preempted, largest rank first: not whose KV is on its way."""
    able = [seq for seq in seqs if seq.state in AT_WORK]
    return sorted(able, key=lambda seq: (seq.rank, seq.request_id), reverse=True)


def displace(
    view: StepView, step: StepBuilder, head: SequenceView, victims: SequenceOf[SequenceView]
) -> None:
    """Preempt victims, the first first, until `head`, which waits, has room; nobody if all are not enough."""
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
