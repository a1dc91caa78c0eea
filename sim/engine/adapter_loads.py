"""LoRA adapters on their way to a replica's GPU."""

from __future__ import annotations

from functools import partial

from policies.core.plan import StepPlan
from sim.engine.attachment import Attachment
from sim.engine.clock import Phase
from sim.engine.replica import Replica


class AdapterLoads(Attachment):
    """Begins the loads that plans ask for, and tells the engine when each is done."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def planned(self, plan: StepPlan | None, now: float) -> None:
        replica = self._replica
        for load in replica.core.take_adapter_loads():
            done_s = replica.copies.links.load(load, now)
            replica.later(done_s, Phase.arrive, partial(replica.adapter_loaded, load.name))
