"""Computes the end times of the iterations of a plan, with the hardware model."""

from __future__ import annotations

from itertools import accumulate, takewhile
from math import isnan

import numpy as np
from numpy.typing import NDArray

from hwmodels.exact import Num
from hwmodels.iterations.iteration import IterationModel, IterationShape
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
