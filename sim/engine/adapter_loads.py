"""Loads of LoRA adapters into the GPU memory of a replica."""

from __future__ import annotations

from functools import partial

from policies.core.plan import StepPlan
from sim.engine.attachment import Attachment
from sim.engine.clock import Clock, Phase
from sim.engine.replica import Replica


class AdapterLoads(Attachment):
    """Begins the adapter loads that plans request, and reports each one to the engine when it is complete."""

    def __init__(self, replica: Replica, clock: Clock) -> None:
        self._replica = replica
        self._clock = clock

    def planned(self, plan: StepPlan | None, now: float) -> None:
        replica = self._replica
        for load in replica.core.take_adapter_loads():
            done_s = replica.copies.links.load(load, now)
            replica.schedule(done_s, Phase.arrive, partial(self._loaded, load.name))

    def _loaded(self, name: str) -> None:
        """Reports to the engine that an adapter is loaded, so that the sequences that wait for it can run."""
        replica = self._replica
        replica.before_external_event()
        assert replica.core.residents is not None
        for seq in replica.core.residents.waiters(name):
            replica.recorder.events.loaded(seq, self._clock.now)
        replica.core.adapter_loaded(name)
        replica.replan()
