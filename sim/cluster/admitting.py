"""An admission policy at the gateway: it is asked before a replica is chosen, and told of what it let in."""

from __future__ import annotations

from policies.admission import Admission
from sim.cluster.door_attachment import DoorAttachment
from sim.cluster.front_door import FrontDoor
from sim.cluster.routers import Hooks
from sim.cluster.visit import Visit
from sim.engine.replica import Replica


class Admitting(DoorAttachment):
    """Asks the policy about each attempt of a client once, and tells it when that is over."""

    def __init__(self, admission: Admission, door: FrontDoor) -> None:
        self._admission = admission
        self._door = door
        self._on_end = Hooks.of(admission).end

    def candidates(self, visit: Visit, serving: list[Replica], now: float) -> list[Replica] | None:
        if visit.is_let_in:
            return serving
        refusal = self._admission.refusal(visit.arrival.request, serving, now)
        if refusal is not None:
            self._door.fail(visit, refusal.reason, refusal.retry_after_s)
            return None
        visit.is_let_in = True
        return serving

    def left(self, visit: Visit, now: float) -> None:
        if visit.is_let_in and self._on_end is not None:
            self._on_end(visit.arrival.request, now)
        visit.is_let_in = False
