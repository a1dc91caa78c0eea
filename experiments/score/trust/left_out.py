"""Leaves out one group of rows at a time: constants are fitted to all others, and predict the group's rows.

A group of a closed-loop table is a model on a GPU; of open-loop runs, a model. Rows of the same model and GPU
in the other table are left out as well. For the errors of a GPU that was never measured, all rows on a GPU
are left out, and it is simulated with the calibration of its relative. Public rows never determine a
constant, so they are predicted with the shipped ones; those for testing only check the bands.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from experiments.score.trust.bands import FAMILY, Cell, RowError, Tree
from experiments.score.trust.cases import SOURCES, Case
from experiments.score.trust.constants import ENGINE, KINDS, steps
from experiments.score.trust.predictions import Predictions, Task
from hwmodels.fitting.host import Constant, Response, fit_constants
from hwmodels.trust import (
    ALL_ENGINES,
    ALL_GPUS,
    HELD_BACK,
    RATIO,
    TRAFFIC,
    ExpectedError,
    Level,
)

FITTED_ROWS = {"silicon": 5, "experiments": 1, "public": 0, "lora": 0}
"""By table, the number of rows of each cell (a profile, a model, a GPU) that constants are fitted to."""

PREDICTED_ROWS = 20
"""Number of rows of each cell that are predicted when their group is left out."""

HELD_BACK_RUNS = 10
"""Number of runs, each with a seed of its own, of a row in which requests waited for a slot or KV memory."""

RELATIVES = {"h100_sxm": "h200_sxm"}
OTHER_RELATIVE = "h100_sxm"
"""GPU whose calibration a GPU of the tables gets when it is left out: as in the tables of operator errors."""

SPREAD = {"TPOT": 0.1, "ITL": 0.1, "TTFT": 0.3}
"""Standard deviation of the logarithm of an error, by figure."""

INDEPENDENT_ROWS = 4
"""Independent rows that a cell's rows count as: configurations of one model, GPU and engine err alike."""

Owned = tuple[str, str]
"""A constant and its owner: an engine profile or a GPU with a calibration."""
Fitted = Mapping[Owned, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Figures that constants are fitted to."""

    cases: Sequence[Case]
    """The case of each figure."""
    constants: Sequence[Owned]
    response: Response
    measured: Any
    weights: Any

    def fit(self, is_left_out: Callable[[Case], bool]) -> Fitted:
        """Fits all constants to the figures of the cases that are not left out."""
        kept = np.array([not is_left_out(case) for case in self.cases])
        kinds = [constant_of(owned) for owned in self.constants]
        found = fit_constants(self.response.rows(kept), self.measured[kept], self.weights[kept], kinds)
        return dict(zip(self.constants, map(float, found), strict=True))


class Outcome(NamedTuple):
    """A figure of a left-out row."""

    case: Case
    figure: str
    level: Level
    error_percent: float
    """Error of the simulated figure in percent: 100 (predicted / measured - 1)."""


def constant_of(owned: Owned) -> Constant:
    """Returns the constant with its owner in its name."""
    owner, name = owned
    return replace(KINDS[name], name=f"{owner}.{name}")


def owned_by(case: Case, name: str) -> Owned:
    """Returns the constant that a case has under a name."""
    return (case.profile if name in ENGINE else case.gpu), name


def to_fit(cases: Iterable[Case]) -> list[Case]:
    """Returns the rows that constants are fitted to."""
    return _sampled(cases, lambda table: FITTED_ROWS[table])


def to_predict(cases: Iterable[Case]) -> list[Case]:
    """Returns the rows that are predicted."""
    return _sampled(cases, lambda table: PREDICTED_ROWS)


def _sampled(cases: Iterable[Case], most: Callable[[str], int]) -> list[Case]:
    """Returns some rows of each cell, the same ones every time. most: rows of a cell, by table."""
    cells: dict[tuple[str, ...], list[Case]] = defaultdict(list)
    for case in cases:
        cells[case.kind].append(case)
    return [
        case
        for own in cells.values()
        for case in sorted(own, key=lambda one: zlib.crc32(one.key.encode()))[: most(own[0].table)]
    ]


def slope_tasks(cases: Iterable[Case]) -> list[Task]:
    """Returns the runs that give the responses: each case unchanged, and with one constant changed."""
    return [
        Task(case=case, values=values)
        for case in cases
        for values in ({}, *steps(case.values, overlapped=case.overlapped))
    ]


def rows_of(cases: Sequence[Case], predictions: Predictions) -> Rows:
    """Returns the figures of the cases with their slopes, after the runs of `slope_tasks`."""
    constants = sorted({owned_by(case, name) for case in cases for name in case.values})
    column = {owned: i for i, owned in enumerate(constants)}
    lines: list[tuple[Case, str, float, Any, Any, Any, float]] = []
    for case in cases:
        source, found = SOURCES[case.table], predictions.of(Task(case=case, values={}))
        if not found:
            continue
        measured, base = source.measured(case.row), source.predicted(case.row, found)
        above, below = _slopes(case, base, predictions)
        at = np.array([constant_of(owned).neutral for owned in constants])
        for name, value in case.values.items():
            at[column[owned_by(case, name)]] = value
        for figure in source.fitted:
            if figure in measured:
                own = [np.zeros(len(constants)), np.zeros(len(constants))]
                for side, slopes in zip(own, (above, below), strict=True):
                    for name, by_figure in slopes.items():
                        side[column[owned_by(case, name)]] = by_figure[figure]
                lines.append((case, figure, base[figure], at, own[0], own[1], measured[figure]))
    counts: dict[tuple[str, ...], int] = defaultdict(int)
    for case in {id(line[0]): line[0] for line in lines}.values():
        counts[case.kind] += 1
    of_case, figure_, base_, at_, above_, below_, measured_ = zip(*lines, strict=True)
    return Rows(
        cases=of_case,
        constants=constants,
        response=Response(
            at=np.array(at_), base=np.array(base_), above=np.array(above_), below=np.array(below_)
        ),
        measured=np.array(measured_),
        weights=np.array(
            [
                INDEPENDENT_ROWS / counts[case.kind] / SPREAD[figure] ** 2
                for case, figure in zip(of_case, figure_, strict=True)
            ]
        ),
    )


def _slopes(
    case: Case, base: Mapping[str, float], predictions: Predictions
) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    """Returns constant -> figure -> slope, towards larger values and towards smaller ones."""
    above: dict[str, dict[str, float]] = {}
    below: dict[str, dict[str, float]] = {}
    for values in steps(case.values, overlapped=case.overlapped):
        [(name, value)] = values.items()
        figures = predictions.of(Task(case=case, values=values))
        if not figures:
            continue
        moved = SOURCES[case.table].predicted(case.row, figures)
        change = value - case.values[name]
        fitted = (figure for figure in SOURCES[case.table].fitted if figure in base)
        slope = {figure: (moved[figure] - base[figure]) / change for figure in fitted}
        (above if change > 0 else below)[name] = slope
    for one, other in ((above, below), (below, above)):
        for name, slope in one.items():
            other.setdefault(name, slope)
    return above, below


def own_values(case: Case, fitted: Fitted, *, gpu: str | None = None) -> dict[str, float]:
    """Returns a case's constants from a fit. gpu: the GPU whose shares it gets; None: its own."""
    owned = {name: (case.profile if name in ENGINE else gpu or case.gpu, name) for name in case.values}
    return {name: fitted.get(key, KINDS[name].neutral) for name, key in owned.items()}


def _is_in_group(group: tuple[str, ...], case: Case) -> bool:
    return case.is_in(group)


def _is_on_gpu(gpu: str, case: Case) -> bool:
    return case.gpu == gpu


def left_out_tasks(cases: Iterable[Case], rows: Rows) -> Iterator[tuple[Task, Level]]:
    """Yields two runs of each predicted case: with constants fitted without its group, without its GPU."""
    by_group: dict[tuple[str, ...], Fitted] = {}
    by_gpu: dict[str, Fitted] = {}
    for case in to_predict(cases):
        if not SOURCES[case.table].fitted:
            yield Task(case=case, values={}), case.level
            continue
        group = case.group
        if group not in by_group:
            by_group[group] = rows.fit(partial(_is_in_group, group))
        yield Task(case=case, values=own_values(case, by_group[group])), Level.measured
        if case.traffic != "closed":
            continue
        if case.gpu not in by_gpu:
            by_gpu[case.gpu] = rows.fit(partial(_is_on_gpu, case.gpu))
        relative = RELATIVES.get(case.gpu, OTHER_RELATIVE)
        values = own_values(case, by_gpu[case.gpu], gpu=relative)
        yield Task(case=case, values=values, calibration=relative), Level.relative


def repeated_tasks(
    runs: Iterable[tuple[Task, Level]], predictions: Predictions
) -> Iterator[tuple[Task, Level]]:
    """Yields further runs, with other seeds, of the rows whose TTFT p99 is `HELD_BACK`."""
    for task, level in runs:
        figures, case = predictions.of(task), task.case
        if figures and HELD_BACK in SOURCES[case.table].predicted(case.row, figures):
            yield from ((replace(task, number=number), level) for number in range(1, HELD_BACK_RUNS))


def outcomes(runs: Iterable[tuple[Task, Level]], predictions: Predictions) -> Iterator[Outcome]:
    """Yields the errors of all figures of the runs; none of a row that could not be simulated.

    A repeated run has the error of `HELD_BACK` only: no other figure depends on the seed by more than 10 %.
    """
    for task, level in runs:
        figures = predictions.of(task)
        if not figures:
            continue
        case, source = task.case, SOURCES[task.case.table]
        predicted, measured = source.predicted(case.row, figures), source.measured(case.row)
        for figure, value in predicted.items():
            if task.number and figure != HELD_BACK:
                continue
            yield Outcome(case, figure, level, 100 * (value / measured[figure] - 1))


def ratios(found: Iterable[Outcome]) -> Iterator[Outcome]:
    """Yields the errors of ratios of two throughputs of one profile, model and GPU: each row over the next.

    The rows are in an order that does not depend on their figures.
    """
    cells: dict[tuple[Any, ...], list[Outcome]] = defaultdict(list)
    for one in found:
        if (one.figure, one.case.traffic) == ("throughput", "closed"):
            cells[(*one.case.kind, one.level)].append(one)
    for own in cells.values():
        own.sort(key=lambda one: zlib.crc32(one.case.key.encode()))
        for one, other in pairwise(own):
            ratio = (100 + one.error_percent) / (100 + other.error_percent)
            yield one._replace(figure=RATIO, error_percent=100 * (ratio - 1))


def tree_of(found: Iterable[Outcome]) -> Tree:
    """Returns the errors by figure and traffic, kind of model, engine and GPU, but those for testing."""
    return Tree(
        RowError(cell_of(one), one.case.kind, one.case.key, one.error_percent)
        for one in found
        if not one.case.is_for_testing
    )


def cell_of(one: Outcome) -> Cell:
    """Returns the innermost cell of an error; a GPU of level `relative` has none of its own.

    Outermost is the quantity, then the level, then its figure in a kind of traffic: `FAMILY` cells in all.
    """
    case = one.case
    quantity = "TPOT" if one.figure == "ITL" else one.figure
    figure = f"{case.traffic}/{one.figure}"
    gpu = (case.device,) if one.level is Level.measured else ()
    return quantity, one.level.value, figure, case.architecture, case.family, *gpu


def expected_errors(found: Sequence[Outcome]) -> list[ExpectedError]:
    """Returns the table: of all engines, of each, and of each by GPU where its operators are measured."""
    tree, rows = tree_of([*found, *ratios(found)]), []
    for cell in tree.cells:
        band = tree.band(cell)
        if len(cell) < FAMILY or band is None:
            continue
        _, level, figure, architecture, *own = cell
        engine, gpu = (*own, *(ALL_ENGINES, ALL_GPUS)[len(own) :])
        traffic, figure = figure.split("/")
        rows.append(
            ExpectedError(
                traffic,
                figure,
                engine,
                gpu,
                architecture,
                Level(level),
                band.rows,
                band.groups,
                band.median_percent,
                band.p90_percent,
                0 if band.basis_groups == band.groups else band.basis_groups,
            )
        )
    return sorted(rows, key=_order)


def num_rows(found: Iterable[Outcome]) -> int:
    """Returns the number of measured rows behind errors, of which a row has one per run."""
    return len({one.case.key for one in found})


def _order(row: ExpectedError) -> tuple[Any, ...]:
    figures = TRAFFIC[row.traffic]
    return (
        row.traffic,
        row.engine,
        row.architecture,
        row.level.value,
        row.gpu,
        figures.index(row.figure),
    )
