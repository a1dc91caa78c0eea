"""An admission policy at the gateway: it is asked before a replica is chosen, and told of what it let in."""

from __future__ import annotations

from policies.admission import Admission, Refusal
from sim.cluster.door_attachment import DoorAttachment
from sim.cluster.routers import Hooks
from sim.cluster.visit import Visit
from sim.engine.replica import Replica


class Admitting(DoorAttachment):
    """Asks the policy about each attempt of a client once, and tells it when that is over."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._on_end = Hooks.of(admission).end

    def refusal(self, visit: Visit, serving: list[Replica], now: float) -> Refusal | None:
        if visit.is_let_in:
            return None
        refusal = self._admission.refusal(visit.arrival.request, serving, now)
        visit.is_let_in = refusal is None
        return refusal

    def left(self, visit: Visit, now: float) -> None:
        if visit.is_let_in and self._on_end is not None:
            self._on_end(visit.arrival.request, now)
        visit.is_let_in = False
