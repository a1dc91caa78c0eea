"""What may join a replica: an attachment is told what happens there, and a replica without it pays nothing.

class TokenCounter(Attachment):
    def prefilled(self, seq: Sequence, now: float) -> None:
        ...

replica.attach(TokenCounter())
"""

from __future__ import annotations

from policies.core.plan import StepPlan
from policies.core.request import Request
from policies.core.sequence import Sequence
from sim.engine.running_step import RunningStep


class Attachment:
    """The events of a replica. A method that a subclass does not override is never called."""

    def sent(self, request: Request) -> None:
        """A request was sent to the replica; its engine may not know it yet."""

    def entered(self, seq: Sequence) -> None:
        """The engine knows a request from now on; no plan has seen it."""

    def planned(self, plan: StepPlan | None, now: float) -> None:
        """The engine has made a plan, or has found nothing to compute. Nothing runs yet."""

    def started(self, step: RunningStep | None, now: float) -> None:
        """The iterations of that plan have begun, or the replica has fallen idle."""

    def ending(self, step: RunningStep, now: float) -> None:
        """A step is about to be committed; step.num_iterations says how many iterations have run."""

    def hands_over(self, seq: Sequence, now: float) -> bool:
        """A prefill is complete; whether the attachment lets another replica go on with the sequence."""
        return False

    def prefilled(self, seq: Sequence, now: float) -> None:
        """A prefill, or a recomputation after a preemption, is complete and has produced a token."""

    def left(self, seq: Sequence) -> None:
        """A sequence has ended, was given up, or goes on elsewhere."""

    def crashed(self, now: float) -> None:
        """The replica has lost its engine and all requests; the new engine is in its place already."""


EVENTS = tuple(name for name in vars(Attachment) if not name.startswith("_"))


def overridden(attachment: Attachment) -> list[str]:
    """The events that an attachment wants to be told."""
    own = type(attachment)
    return [name for name in EVENTS if getattr(own, name) is not getattr(Attachment, name)]
