"""A replica whose engine has several batches in flight, each on one stage of a pipeline at a time.

    planned   a b c         d           e       whenever there is room, and something to compute
    stage 1   |a|b|c|       |d|         |e|
    stage 2     |a|b|c|       |d|         |e|
    stage 3       |a|b|c|       |d|
    committed           a     b c         d

A batch has its tokens when it has left the last stage; its time is the sum over the stages, and those that
follow it are behind it by the slowest. While batches are in flight the engine waits for the oldest of them,
as vLLM's does: what arrives meanwhile is planned when that has ended.
`policies.core.batches` decides what is in a batch, `hwmodels.iterations.pipeline` when it ends.
In the records, an iteration begins when the one before it has ended, or when it is planned, if that is later:
the rows of a replica do not overlap, and the first of a burst is the longest.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol, cast

from hwmodels.iterations.iteration import IterationShape
from hwmodels.iterations.pipeline import Pipeline
from hwmodels.iterations.stages import Pass, Stages
from policies.core.batches import Batches
from policies.core.plan import StepPlan
from sim.engine.replica import Replica
from sim.engine.replica_pool import ReplicaPool
from sim.engine.run_context import RunContext
from sim.engine.running_step import RunningStep
from sim.engine.shape import shape_of, shapes_of_ranks


class PipelineModel(Protocol):
    """A hardware model with stages."""

    stages: Stages

    def stage_times(self, shape: IterationShape) -> Pass:
        """Returns the times of one batch."""
        ...


class PipelinedReplica(Replica):
    """A replica with pipeline parallelism. `step` is the batch that has been in flight longest."""

    def __init__(self, index: int, pool: ReplicaPool, context: RunContext) -> None:
        Replica.__init__(self, index, pool, context)
        self._model = cast(PipelineModel, pool.model)
        self._pipeline = self._empty_pipeline()
        self._batches: deque[RunningStep] = deque()
        self._last_end_s = 0.0

    @property
    def _core_batches(self) -> Batches:
        batches = self.core.batches
        assert batches is not None
        return batches

    def _empty_pipeline(self) -> Pipeline:
        return Pipeline(len(self._model.stages.all))

    def _finish_step(self) -> None:
        """Commits the batch that has been in flight longest."""
        self._batches.popleft()
        Replica._finish_step(self)
        self.step = self._batches[0] if self._batches else None

    def _begin_step(self, now: float) -> None:
        """Plans batches until no more may be in flight, or nothing is left to compute."""
        intake = self.intake
        self._timer = None
        if intake.next_s <= now:
            intake.enter_at(now, self._is_idle)
            if self._aborts:
                self._end_requests()
        while not (self._at_boundary or self._core_batches.is_full) and self._begin_batch(now):
            pass
        if self.step is not None:
            self._is_idle = False
            self._timer = self._clock.at(self.step.end_s, self.index, self._on_boundary)

    def _begin_batch(self, now: float) -> bool:
        """Plans one batch and starts it; returns whether there was anything to compute."""
        plan = self.core.plan(now)
        transfers = self.core.take_transfers()
        delay_s = self.copies.begin(transfers, now) if transfers else 0.0
        for notify in self._listeners.planned:
            notify(plan, now)
        if transfers or plan is not None or not self._batches:
            self.recorder.planned(plan, transfers, now)
        if plan is not None:
            self._start_step(plan, now, delay_s)
        elif not self._batches:
            self._go_idle(now)
        for notify_started in self._listeners.started:
            notify_started(self._batches[-1] if self._batches else None, now)
        return plan is not None

    def _start_step(self, plan: StepPlan, now: float, delay_s: float) -> None:
        """Lets a batch follow those in flight."""
        shape = shape_of(plan, 0)
        factor = self._slowdown
        if self._factors is not None:
            factor *= float(self._factors.of(plan.index, 1)[0])
        shapes = shapes_of_ranks(plan, shape, 0) if self.pool.waits_for_ranks and plan.ranks else [shape]
        slowest = max(map(self._model.stage_times, shapes), key=lambda times: sum(times.stage_s))
        end_s = self._pipeline.enter(slowest, now + delay_s, factor)
        start_s = max(now, self._last_end_s)
        self._last_end_s = end_s
        self._batches.append(RunningStep(plan, shape if plan.chunks else None, start_s, [end_s]))
        self.step = self._batches[0]
        self._core_batches.depart(plan)

    def _end_requests(self) -> None:
        """Aborts requests; other actions wait until no batch is in flight, and no batch is planned before."""
        if not self._batches:
            Replica._end_requests(self)
            return
        actions, migrated = self._at_boundary, set(self._migrated)
        self._at_boundary = []
        Replica._end_requests(self)
        self._at_boundary, self._migrated = actions, migrated

    def crash(self) -> list[int]:
        """Does what `Replica.crash` does; the batches in flight are lost."""
        lost = Replica.crash(self)
        self._batches.clear()
        self._pipeline, self._last_end_s = self._empty_pipeline(), self._clock.now
        return lost
