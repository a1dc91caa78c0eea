"""Seconds of every operator in every step of a grid, and of whole steps, measured in random order on a CPU.

A small decode step, the reference step, runs before each measured step, so that the CPU caches hold what they
hold in service. It also shows the speed of the machine at that moment.

The speed of a shared machine varies by a quarter for seconds at a time. Steps are therefore repeated over the
whole budget, each repetition is corrected to the machine's usual speed (`experiments.calibrate.engine.pace`),
and the median of the corrected times is the result.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.calibrate.engine.grids import Point
from experiments.calibrate.engine.pace import CoreTime, Pace, Reference, paces
from experiments.calibrate.engine.served import Served
from experiments.calibrate.engine.steps import REFERENCE, Step
from experiments.calibrate.engine.watch import OUTPUTS, Stopwatch

LEAST_REPEATS = 3
MOST_REPEATS = 50
MOST_OF_FASTEST = 0.9
"""Largest share of the fastest operator's time that may be the overhead of its mark."""
PROGRESS_EVERY = 100
"""Runs between two progress messages."""

Progress = Callable[[str], None]


class Sections(NamedTuple):
    """Operators of one step: median seconds by name, summed over the calls of the name."""

    point: Point
    seconds: dict[str, float]


class Total(NamedTuple):
    """One whole step: median seconds, and the spread of its repetitions (p90 - p10 over the median).

    On a CPU, the repetitions are corrected to the machine's usual speed.
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
) -> tuple[list[Sections], list[Total], Reference]:
    """Measures on a CPU, in thread time, the operators of the points and whole steps without a watch.

    Returns the operators, the whole steps, and the reference step.
    """
    watch = served.watched.watch = Stopwatch()
    num_points = len(points)
    todo = [point.step for point in points]
    marks: list[dict[str, int]] = []

    def run(place: int) -> dict[str, float]:
        """Runs a step and returns seconds by operator; the time of an unwatched step is all `OUTPUTS`."""
        work = served.work(todo[place])
        watch.start()
        (served.executor if place < num_points else served.plain).run(work)
        watch.mark(OUTPUTS)
        return watch.seconds

    def run_first(place: int) -> float:
        seconds = run(place)
        marks.append(watch.marks)
        return sum(seconds.values())

    begin_s, core = time.thread_time(), CoreTime()
    first_s = [run_first(place) for place in range(num_points)]
    short = np.argsort(first_s)[: num_points // 3 + 1].tolist()  # short steps show the overhead of the watch
    todo += [*(todo[place] for place in short), *steps, REFERENCE]
    first_s += [run_first(place) for place in range(num_points, len(todo))]
    places = _order(np.array(first_s), budget_s - (time.thread_time() - begin_s), seed)
    found: list[dict[str, float]] = []
    for number, place in enumerate(places.tolist()):
        if number % PROGRESS_EVERY == 0:
            progress(f"{number} of {len(places)} steps, {time.thread_time() - begin_s:.0f} s")
        found.append(run(place))
    served.watched.watch = None
    core_share = core.share
    pace = paces(places, np.array([sum(seconds.values()) for seconds in found]))
    repetitions: list[list[dict[str, float]]] = [[] for _ in todo]
    for place, seconds, slowdown in zip(places.tolist(), found, pace.tolist(), strict=True):
        repetitions[place].append({name: value / slowdown for name, value in seconds.items()})
    watched_s = [_medians(each) for each in repetitions[:num_points]]
    *totals, reference = map(_total, todo[num_points:], repetitions[num_points:])
    fastest_s = min(
        value / calls[name]
        for seconds, calls in zip(watched_s, marks, strict=False)
        for name, value in seconds.items()
    )
    mark_s = _mark_seconds(
        [watched_s[place] for place in short], [marks[place] for place in short], totals, fastest_s
    )
    sections = [
        Sections(point, {name: value - mark_s * calls[name] for name, value in seconds.items()})
        for point, seconds, calls in zip(points, watched_s, marks, strict=False)
    ]
    return sections, totals[len(short) :], Reference(reference.seconds, Pace.of(pace, core_share))


def _mark_seconds(
    watched_s: Sequence[Mapping[str, float]],
    marks: Sequence[Mapping[str, int]],
    totals: Sequence[Total],
    fastest_s: float,
) -> float:
    """Returns the overhead of one mark in seconds: the median extra time of watched steps per mark.

    fastest_s: time of the fastest watched operator, its mark included. On a busy machine the difference of
    whole steps may exceed that, and subtracting it would leave some operators no time at all.
    """
    extra_s = np.median(
        [
            (sum(seconds.values()) - total.seconds) / sum(calls.values())
            for seconds, calls, total in zip(watched_s, marks, totals, strict=False)
        ]
    )
    return float(np.clip(extra_s, 0.0, MOST_OF_FASTEST * fastest_s))


def _order(each_s: NDArray[np.float64], budget_s: float, seed: int) -> NDArray[np.intp]:
    """Returns the indices of the steps in the order of their runs, with the reference step before each.

    Short steps are repeated more often, because lowering their error takes little time.
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
