"""Seconds of every operator in every step of a grid: medians over rounds, each in another order."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from experiments.calibrate_engine.grids import Point
from experiments.calibrate_engine.served import Served
from experiments.calibrate_engine.steps import Step
from experiments.calibrate_engine.watch import OUTPUTS, Stopwatch

LEAST_ROUNDS = 4
MOST_ROUNDS = 25

Progress = Callable[[str], None]


class Sections(NamedTuple):
    """One step's operators: median seconds by name, all calls of a name together."""

    point: Point
    seconds: dict[str, float]


class Total(NamedTuple):
    """One step as a whole: median seconds, and the spread of its repetitions (p90 - p10 over the median)."""

    step: Step
    seconds: float
    spread: float


def measure(
    served: Served,
    points: Sequence[Point],
    steps: Sequence[Step],
    budget_s: float,
    seed: int,
    progress: Progress,
) -> tuple[list[Sections], list[Total]]:
    """On a CPU, by thread time: the operators of points, and steps as a whole with nobody watching.

    One after the other in each round, so that both see the machine in the same moods. Rounds go on until the
    budget, of thread time too, is spent; the first only warms up.
    """
    watch = Stopwatch()
    watched_s: list[list[dict[str, float]]] = [[] for _ in points]
    whole_s: list[list[float]] = [[] for _ in steps]

    def run_watched(place: int) -> None:
        work = served.work(points[place].step)
        served.watched.watch = watch
        watch.start()
        served.executor.run(work)
        watch.mark(OUTPUTS)
        served.watched.watch = None
        watched_s[place].append(watch.seconds)

    def run_whole(place: int) -> None:
        work = served.work(steps[place])
        begin_s = time.thread_time()
        served.executor.run(work)
        whole_s[place].append(time.thread_time() - begin_s)

    runs = [partial(run_watched, place) for place in range(len(points))]
    runs += [partial(run_whole, place) for place in range(len(steps))]
    shuffle, begin_s = random.Random(seed), time.thread_time()
    for number in range(MOST_ROUNDS):
        spent_s = time.thread_time() - begin_s
        if number >= LEAST_ROUNDS and spent_s * (number + 1) / number > budget_s:
            break
        progress(f"round {number + 1}, {spent_s:.0f} s of {budget_s:.0f} s")
        shuffle.shuffle(runs)
        for run in runs:
            run()
    sections = [Sections(point, _medians(each[1:])) for point, each in zip(points, watched_s, strict=True)]
    return sections, [_total(step, each[1:]) for step, each in zip(steps, whole_s, strict=True)]


def _total(step: Step, seconds: Sequence[float]) -> Total:
    low, middle, high = np.quantile(seconds, [0.1, 0.5, 0.9]).tolist()
    return Total(step, middle, (high - low) / middle)


def _medians(repetitions: Sequence[dict[str, float]]) -> dict[str, float]:
    return {
        name: float(np.median([sections[name] for sections in repetitions]))
        for name in dict.fromkeys(name for sections in repetitions for name in sections)
    }
