"""Attachments: listeners to the events of a replica. A replica without attachments does no work for them.

    class TokenCounter(Attachment):
        def prefilled(self, seq: Sequence, now: float) -> None:
            ...

`Replica.attach(TokenCounter())` adds it; `sim.cluster.simulation` adds the attachments that a run needs.
"""

from __future__ import annotations

from collections.abc import Callable

from policies.core.plan import StepPlan
from policies.core.request import Request
from policies.core.sequence import Sequence
from policies.gateway.gateway import add_handlers
from sim.engine.iteration_times import RunningStep


class Attachment:
    """Handlers of the events of a replica. A method that a subclass does not override is never called."""

    def sent(self, request: Request) -> None:
        """Handles a request that was sent to the replica; its engine may not know it yet."""

    def entered(self, seq: Sequence) -> None:
        """Handles a request that has just reached the engine; no plan has included it yet."""

    def planned(self, plan: StepPlan | None, now: float) -> None:
        """Handles a new plan whose iterations have not started; None: there is nothing to compute."""

    def started(self, step: RunningStep | None, now: float) -> None:
        """Handles the start of the iterations of that plan; None: the replica is idle."""

    def ending(self, step: RunningStep, now: float) -> None:
        """Handles a step that is about to be committed, after step.num_iterations iterations."""

    def transfers_prefilled(self, seq: Sequence, now: float) -> bool:
        """Handles a completed prefill; returns true if it begins a KV transfer to another replica."""
        return False

    def prefilled(self, seq: Sequence, now: float) -> None:
        """Handles the token that a prefill, or a recomputation after a preemption, has produced."""

    def before_external_event(self) -> None:
        """Prepares for an external event in the middle of a step: loaded KV, an abort, a slowdown."""

    def left(self, seq: Sequence) -> None:
        """Handles a sequence that has finished, was aborted, or continues in another replica."""

    def crashed(self, now: float) -> None:
        """Handles a crash, after an empty engine has replaced the one that lost all requests."""


class PlanListener(Attachment):
    """Calls on_plan with every plan of a replica before its first iteration."""

    def __init__(self, on_plan: Callable[[StepPlan], None]) -> None:
        self._on_plan = on_plan

    def planned(self, plan: StepPlan | None, now: float) -> None:
        if plan is not None:
            self._on_plan(plan)


class Listeners:
    """The functions that a replica calls, by event; most events of most runs have none.

    Attributes in place of a dictionary, as they are read millions of times.
    """

    def __init__(self) -> None:
        self.sent: tuple[Callable[[Request], None], ...] = ()
        self.entered: tuple[Callable[[Sequence], None], ...] = ()
        self.planned: tuple[Callable[[StepPlan | None, float], None], ...] = ()
        self.started: tuple[Callable[[RunningStep | None, float], None], ...] = ()
        self.ending: tuple[Callable[[RunningStep, float], None], ...] = ()
        self.transfers_prefilled: tuple[Callable[[Sequence, float], bool], ...] = ()
        self.prefilled: tuple[Callable[[Sequence, float], None], ...] = ()
        self.before_external_event: tuple[Callable[[], None], ...] = ()
        self.left: tuple[Callable[[Sequence], None], ...] = ()
        self.crashed: tuple[Callable[[float], None], ...] = ()

    def add(self, attachment: Attachment) -> None:
        """Adds the handlers that an attachment overrides; they are called after earlier ones."""
        add_handlers(self, attachment, Attachment)
