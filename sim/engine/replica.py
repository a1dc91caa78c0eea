"""One engine on the simulated clock, with what befalls it: slowdowns, crashes, the end of the run.

The main loop, and how requests reach the engine and leave it, are in `sim.engine.engine_loop`.
"""

from __future__ import annotations

from functools import partial
from math import inf

from sim.engine.engine_loop import EngineLoop


class Replica(EngineLoop):
    """An engine that can slow down and crash. It is a `policies.routing.ReplicaView`."""

    @property
    def running_since_s(self) -> float:
        """Returns the time at which the iterations that run began, s; inf: none run."""
        return inf if self.step is None else self.step.start_s

    def slow_down(self, factor: float) -> None:
        """Multiplies the duration of iterations that begin from now on by `factor`; 1: normal speed."""
        if factor != self._slowdown:
            self.before_external_event()
            self._slowdown = factor
            self._scales_times = self.has_own_times or self._factors is not None or factor != 1
            self.replan()

    def crash(self) -> list[int]:
        """Replaces the engine by an empty one; returns the ids of the requests that are lost, sorted.

        The tokens of iterations that have ended by now have been sent to the clients.
        """
        now = self._clock.now
        self._finish_until(now, begins_at_now=False)
        lost = [seq for seq in self.core.unfinished if seq.request_id not in self._migrated]
        pending, before = self.intake.entries(), self.core
        self.core = self.pool.core()
        self.core.num_iterations = self.core.block_pool.num_iterations = before.num_iterations
        self.recorder.crashed(lost, pending, self.core, now)
        self._num_crashes += 1
        if self.frontend is not None:
            self.frontend.reset()
        self.step = self._timer = None
        self._is_idle, self._wake_s = True, inf
        self.intake.clear()
        self._aborts.clear()
        self._at_boundary.clear()
        self._migrated.clear()
        self._uncount_all()
        self.copies.links = self.pool.links()
        for notify in self._listeners.crashed:
            notify(now)
        return sorted([*(seq.request_id for seq in lost), *(entry.request.request_id for entry in pending)])

    def stop(self, now: float) -> None:
        """Ends the run: records the iterations that have ended, and the progress of unfinished requests."""
        self._finish_until(now, begins_at_now=not self._clock.is_stopped)
        self.recorder.stopped(self.intake.entries(), now)

    def _finish_until(self, now: float, *, begins_at_now: bool) -> None:
        """Commits the iterations that have ended by `now`. begins_at_now: whether the next begins then."""
        step = self.step
        if step is not None and (num_ended := step.num_ended(now)):
            num_blocks = 0
            if num_ended < step.num_iterations and (begins_at_now or step.ends_s[num_ended - 1] < now):
                blocks_after = partial(self.core.blocks_of_repeats, step.plan)
                num_blocks = blocks_after(num_ended) - blocks_after(num_ended - 1)
            step.cut(num_ended)
            self._finish_step()
            self.core.block_pool.take(num_blocks)  # those of the iteration in progress

    def holds(self, request_id: int) -> bool:
        """Returns whether a request is in the engine or on its way to it."""
        return self.core.find(request_id) is not None or request_id in self.intake

    def has_adapter(self, name: str) -> bool:
        """Returns whether an adapter is in GPU memory or is being loaded."""
        return self.core.residents is not None and self.core.residents.is_resident(name)
