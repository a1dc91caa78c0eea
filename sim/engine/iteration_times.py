"""Computes the end times of the iterations of a plan, with the hardware model."""

from __future__ import annotations

from itertools import accumulate, takewhile
from math import isnan
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from hwmodels.exact import Num
from hwmodels.iterations.iteration import IterationModel, IterationShape
from hwmodels.iterations.stages import Pass, Pipeline, Stages
from policies.core.plan import StepPlan
from sim.engine.shape import shape_of, shapes_of_ranks


def scaled_ends_s(
    model: IterationModel,
    plan: StepPlan,
    shape: IterationShape | None,
    num_iterations: int,
    start_s: float,
    factors: float | NDArray[np.float64],
    by_rank: bool = False,
) -> list[float]:
    """Returns the end time of each iteration of a plan, in seconds, added up one by one as stepping does.

    shape: the shape of the first iteration, if the plan has prompt chunks. factors: by which iterations take
    longer than the model says: one number, or an array of one number per iteration; of one iteration always a
    number. by_rank: see `seconds_of`. The list ends before the first iteration that the model cannot price,
    as the leap may be cut earlier anyway. Raises UnknownIterationError if it cannot price the first one.
    """
    if num_iterations == 1:
        shape = shape or shape_of(plan, 0)
        return [float(start_s + factors * seconds_of(model, plan, shape, 0, by_rank))]
    steps = np.arange(num_iterations)
    seconds = np.asarray(seconds_of(model, plan, shape_of(plan, steps), steps, by_rank))
    durations_s = (factors * np.broadcast_to(seconds, num_iterations)).tolist()
    durations_s[0] += start_s
    ends = list(accumulate(durations_s))
    if isnan(ends[-1]):
        ends = list(takewhile(lambda end_s: not isnan(end_s), ends))
        if not ends:  # raises, and the message says what the model lacks
            model.seconds(shape_of(plan, 0))
    return ends


def seconds_of(model: IterationModel, plan: StepPlan, shape: IterationShape, step: Num, by_rank: bool) -> Num:
    """Returns the seconds of the plan's iteration `step`, or of each of an array of them.

    by_rank: ranks of data-parallel attention wait for the slowest of them. Otherwise the model is given the
    iteration of all ranks together.
    """
    if not (by_rank and plan.ranks):
        return model.seconds(shape)
    first, *others = shapes_of_ranks(plan, shape, step)
    seconds = model.seconds(first)
    for other in others:
        seconds = np.maximum(seconds, model.seconds(other))
    return seconds


class _StagedModel(Protocol):
    """A hardware model with pipeline stages."""

    stages: Stages

    def stage_times(self, shape: IterationShape) -> Pass:
        """Returns the times of one batch."""
        ...


class BatchTimes:
    """The end times of the batches of a pipeline, each on one stage at a time.

        planned   a b c         d           e       whenever there is room, and something to compute
        stage 1   |a|b|c|       |d|         |e|
        stage 2     |a|b|c|       |d|         |e|
        stage 3       |a|b|c|       |d|
        committed           a     b c         d

    A batch has its tokens when it has left the last stage; its time is the sum over the stages, and those
    that follow it are behind it by the slowest. `policies.core.parts` decides what is in a batch.
    In the records, an iteration begins when the one before it has ended, or when it is planned, if that is
    later: the rows of a replica do not overlap, and the first of a burst is the longest.
    """

    def __init__(self, model: IterationModel) -> None:
        self._model = cast(_StagedModel, model)
        self._pipeline = Pipeline(len(self._model.stages.all))

    def end_s(
        self, plan: StepPlan, shape: IterationShape | None, start_s: float, factor: float, by_rank: bool
    ) -> float:
        """Returns the end time of a batch that enters at start_s, with arguments as of `scaled_ends_s`."""
        shape = shape or shape_of(plan, 0)
        shapes = shapes_of_ranks(plan, shape, 0) if by_rank and plan.ranks else [shape]
        slowest = max(map(self._model.stage_times, shapes), key=lambda times: sum(times.stage_s))
        return self._pipeline.enter(slowest, start_s, factor)
