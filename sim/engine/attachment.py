"""What may join a replica: an attachment is told what happens there, and a replica without it pays nothing.

    class TokenCounter(Attachment):
        def prefilled(self, seq: Sequence, now: float) -> None:
            ...

`Replica.attach(TokenCounter())` lets it join; `sim.cluster.simulation` does so for what a run has.
"""

from __future__ import annotations

from collections.abc import Callable

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

    def transfers_prefilled(self, seq: Sequence, now: float) -> bool:
        """A prefill is complete; returns whether the attachment transfers the sequence to another replica."""
        return False

    def prefilled(self, seq: Sequence, now: float) -> None:
        """A prefill, or a recomputation after a preemption, is complete and has produced a token."""

    def intervening(self) -> None:
        """Something comes from outside in the middle of a step: KV, an abort, a change of speed."""

    def left(self, seq: Sequence) -> None:
        """A sequence has ended, was given up, or goes on elsewhere."""

    def crashed(self, now: float) -> None:
        """The replica has lost its engine and all requests; the new engine is in its place already."""


class Listeners:
    """The functions that a replica calls, by event; none for most events of most runs.

    Attributes, as they are looked up millions of times.
    """

    def __init__(self) -> None:
        self.sent: tuple[Callable[[Request], None], ...] = ()
        self.entered: tuple[Callable[[Sequence], None], ...] = ()
        self.planned: tuple[Callable[[StepPlan | None, float], None], ...] = ()
        self.started: tuple[Callable[[RunningStep | None, float], None], ...] = ()
        self.ending: tuple[Callable[[RunningStep, float], None], ...] = ()
        self.transfers_prefilled: tuple[Callable[[Sequence, float], bool], ...] = ()
        self.prefilled: tuple[Callable[[Sequence, float], None], ...] = ()
        self.intervening: tuple[Callable[[], None], ...] = ()
        self.left: tuple[Callable[[Sequence], None], ...] = ()
        self.crashed: tuple[Callable[[float], None], ...] = ()

    def add(self, attachment: Attachment) -> None:
        """Call an attachment, behind those that were added before."""
        for event, called in list(vars(self).items()):
            if getattr(type(attachment), event) is not getattr(Attachment, event):
                setattr(self, event, (*called, getattr(attachment, event)))
