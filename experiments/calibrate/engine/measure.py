"""Seconds of every operator in every step of a grid, and of whole steps: all in one random order.

Each comes behind a small decode step, the one of reference, as it does in service: caches hold what such a
step leaves. That one tells the machine's pace besides.

A shared machine is now faster and now slower, by a quarter for seconds at a time. So steps are repeated all
over the budget, and each repetition is taken as it would have been at the machine's usual pace
(`experiments.calibrate.engine.pace`); medians of that are the answer.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.calibrate.engine.grids import Point
from experiments.calibrate.engine.pace import paces
from experiments.calibrate.engine.served import Served
from experiments.calibrate.engine.steps import REFERENCE, Step
from experiments.calibrate.engine.watch import OUTPUTS, Stopwatch

LEAST_REPEATS = 3
MOST_REPEATS = 50
TOLD_EVERY = 100
"""Runs between two messages of progress."""

Progress = Callable[[str], None]


class Sections(NamedTuple):
    """One step's operators: median seconds by name, all calls of a name together."""

    point: Point
    seconds: dict[str, float]


class Total(NamedTuple):
    """One step as a whole: median seconds, and the spread of its repetitions (p90 - p10 over the median).

    On a CPU at one pace of the machine.
    """

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
) -> tuple[list[Sections], list[Total], float]:
    """On a CPU, by thread time: the operators of points, and whole steps without a watch.

    The last of the answer: what the step of reference takes.
    """
    watch = served.watched.watch = Stopwatch()
    num_points = len(points)
    todo = [point.step for point in points]
    marks: list[dict[str, int]] = []

    def run(place: int) -> dict[str, float]:
        """By operator where the step is watched, else all of it is outputs."""
        work = served.work(todo[place])
        watch.start()
        (served.executor if place < num_points else served.plain).run(work)
        watch.mark(OUTPUTS)
        return watch.seconds

    def run_first(place: int) -> float:
        seconds = run(place)
        marks.append(watch.marks)
        return sum(seconds.values())

    begin_s = time.thread_time()
    first_s = [run_first(place) for place in range(num_points)]
    short = np.argsort(first_s)[: num_points // 3 + 1].tolist()  # of which is seen what watching takes
    todo += [*(todo[place] for place in short), *steps, REFERENCE]
    first_s += [run_first(place) for place in range(num_points, len(todo))]
    places = _order(np.array(first_s), budget_s - (time.thread_time() - begin_s), seed)
    found: list[dict[str, float]] = []
    for number, place in enumerate(places.tolist()):
        if number % TOLD_EVERY == 0:
            progress(f"{number} of {len(places)} steps, {time.thread_time() - begin_s:.0f} s")
        found.append(run(place))
    served.watched.watch = None
    pace = paces(places, np.array([sum(seconds.values()) for seconds in found]))
    repetitions: list[list[dict[str, float]]] = [[] for _ in todo]
    for place, seconds, slower in zip(places.tolist(), found, pace.tolist(), strict=True):
        repetitions[place].append({name: value / slower for name, value in seconds.items()})
    watched_s = [_medians(each) for each in repetitions[:num_points]]
    *totals, reference = map(_total, todo[num_points:], repetitions[num_points:])
    mark_s = _mark_seconds([watched_s[place] for place in short], [marks[place] for place in short], totals)
    sections = [
        Sections(point, {name: value - mark_s * calls[name] for name, value in seconds.items()})
        for point, seconds, calls in zip(points, watched_s, marks, strict=False)
    ]
    return sections, totals[len(short) :], reference.seconds


def _mark_seconds(
    watched_s: Sequence[Mapping[str, float]], marks: Sequence[Mapping[str, int]], totals: Sequence[Total]
) -> float:
    """What watching takes of each mark: by how much steps take longer, at the median."""
    return float(
        np.median(
            [
                (sum(seconds.values()) - total.seconds) / sum(calls.values())
                for seconds, calls, total in zip(watched_s, marks, totals, strict=False)
            ]
        )
    )


def _order(each_s: NDArray[np.float64], budget_s: float, seed: int) -> NDArray[np.intp]:
    """Places in the order of their runs, the last place before every other.

    Short steps come more often: their error is cheap to lower.
    """
    *todo_s, reference_s = each_s.tolist()
    weight = 1 / np.sqrt(todo_s)
    repeats = weight * budget_s / (weight * (np.array(todo_s) + reference_s)).sum()
    repeats = np.clip(np.round(repeats), LEAST_REPEATS, MOST_REPEATS).astype(np.intp)
    places = np.repeat(np.arange(len(todo_s)), repeats).tolist()
    random.Random(seed).shuffle(places)
    return np.array([place for other in places for place in (len(todo_s), other)], np.intp)


def _total(step: Step, repetitions: Sequence[dict[str, float]]) -> Total:
    whole_s = [sum(seconds.values()) for seconds in repetitions]
    low, middle, high = np.quantile(whole_s, [0.1, 0.5, 0.9]).tolist()
    return Total(step, middle, (high - low) / middle)


def _medians(repetitions: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.median([seconds[name] for seconds in repetitions])) for name in repetitions[0]}
