"""Computes comparisons between arms, and judges expectations, from the table of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import pandas as pd

from experiments.compare.settings import Expectation, Experiment
from experiments.study.figures import Metric
from experiments.study.runs import Runs
from experiments.study.trace_runs import TraceRun, compare_traced, trace_interval
from sim.metrics.confidence import Held, Interval, Outcome, Paired, compare_paired, judge_ratio, mean_interval
from sim.metrics.definitions import plain_json

CLIPPED = "workload.num_clipped"  # a figure of summary.json


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One metric of one arm at one swept value, compared with the baseline."""

    metric: Metric
    arm: str
    swept: Any
    mean: Interval
    paired: Paired | None
    """None for the baseline."""

    @property
    def outcome(self) -> Outcome | None:
        return self.paired.outcome(self.metric.better) if self.paired else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """Expectation at one swept value, with its result."""

    expectation: Expectation
    over: str
    swept: Any
    paired: Paired
    held: Held


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """Results of an experiment."""

    experiment: Experiment
    runs: Runs
    """If it has runs of a trace, the pairs are blocks of the trace."""
    comparisons: tuple[Comparison, ...]
    judged: tuple[Judged, ...]
    clipped_apart: bool
    """True if arms truncated different numbers of the same requests, as their context lengths differ."""

    @property
    def traced(self) -> bool:
        """True if intervals are from blocks of a trace."""
        return bool(self.runs.traced)

    @property
    def pairs(self) -> str:
        """Name of the pairs of a comparison."""
        return "paired blocks of the trace" if self.traced else "paired seeds"

    @property
    def every(self) -> str:
        """Name of all of them."""
        return "every block of the trace" if self.traced else "every seed"

    def of(self, metric: Metric, arm: str) -> list[Comparison]:
        """Returns the comparisons of a metric and an arm, in the order of the swept values."""
        return [c for c in self.comparisons if c.metric == metric and c.arm == arm]

    def to_json(self, sentences: Sequence[str]) -> dict[str, Any]:
        """Returns the content of summary.json; a figure that does not exist is null."""
        experiment = self.experiment
        record: dict[str, Any] = plain_json(
            {
                "title": experiment.title,
                "claim": experiment.claim,
                "source": experiment.source,
                "interrupted": self.runs.interrupted,
                "runs": {"done": len(self.runs.table), "asked": experiment.num_runs},
                "baseline": experiment.baseline,
                "verdicts": list(sentences),
                "expectations": [_judged_record(judged) for judged in self.judged],
                "comparisons": [_comparison_record(comparison) for comparison in self.comparisons],
            }
        )
        return record


def evaluate(experiment: Experiment, runs: Runs) -> Results:
    """Compares the arms and judges the expectations.

    Seeds without a value in both arms are left out of the pairs. Intervals of a trace are from its blocks.
    """
    figures = _Figures(experiment, runs)
    comparisons = tuple(
        Comparison(
            metric=metric,
            arm=arm,
            swept=value,
            mean=figures.mean(metric.key, arm, i),
            paired=None
            if arm == experiment.baseline
            else figures.paired(metric.key, arm, experiment.baseline, i),
        )
        for metric in experiment.metrics
        for i, value in enumerate(experiment.swept)
        for arm in experiment.arms
    )
    judged = tuple(
        _judge(figures, expectation, i)
        for expectation in experiment.expect
        for i, value in enumerate(experiment.swept)
        if expectation.at is None or expectation.at == value
    )
    return Results(
        experiment=experiment,
        runs=runs,
        comparisons=comparisons,
        judged=judged,
        clipped_apart=_clipped_apart(runs.table),
    )


def _clipped_apart(runs: pd.DataFrame) -> bool:
    if CLIPPED not in runs:
        return False
    of_traffic = runs.groupby(["seed", "swept"], dropna=False)[CLIPPED]
    return bool((of_traffic.nunique() > 1).any())


def _judge(figures: _Figures, expectation: Expectation, index: int) -> Judged:
    experiment = figures.experiment
    over = expectation.over or experiment.baseline
    paired = figures.paired(expectation.metric, expectation.arm, over, index)
    return Judged(
        expectation=expectation,
        over=over,
        swept=experiment.swept[index],
        paired=paired,
        held=judge_ratio(
            paired.ratio, at_least=expectation.at_least_ratio, at_most=expectation.at_most_ratio
        ),
    )


class _Figures(NamedTuple):
    """Figures of the runs of an experiment, with their intervals."""

    experiment: Experiment
    runs: Runs

    def mean(self, key: str, arm: str, index: int) -> Interval:
        """Returns the mean of a metric over the seeds, or its value in the one run of a trace."""
        found = mean_interval(self._values(key, arm, index))
        run = self._traced(arm, index)
        return found if run is None or not found.num_values else trace_interval(run, key, found.mean)

    def paired(self, key: str, arm: str, over: str, index: int) -> Paired:
        """Compares a metric of two arms over the seeds, or over blocks of the trace."""
        ours, theirs = self._values(key, arm, index), self._values(key, over, index)
        one, other = self._traced(arm, index), self._traced(over, index)
        if one is None or other is None:
            return compare_paired(ours, theirs)
        found = compare_traced([one, other], key, [ours[0], theirs[0]])
        if found is not None:
            return found
        alone = compare_paired(ours[:1], theirs[:1])
        return compare_paired(ours, theirs) if alone.same else alone

    def _traced(self, arm: str, index: int) -> TraceRun | None:
        return self.runs.traced.get((arm, self.experiment.swept[index]))

    def _values(self, key: str, arm: str, index: int) -> list[float]:
        """Returns the metric for each seed of the experiment; NaN if the run or the value does not exist."""
        table = self.runs.table
        mine = table[table["arm"] == arm]
        if self.experiment.sweep is not None:
            mine = mine[mine["swept"] == self.experiment.swept[index]]
        by_seed = dict(zip(mine["seed"], mine[key], strict=True)) if key in mine else {}
        return [float(by_seed.get(seed, math.nan)) for seed in self.experiment.seeds]


def _comparison_record(comparison: Comparison) -> dict[str, Any]:
    outcome = comparison.outcome
    return {
        "metric": comparison.metric.key,
        "better": comparison.metric.better,
        "arm": comparison.arm,
        "swept": comparison.swept,
        "mean": comparison.mean._asdict(),
        "against_baseline": None
        if comparison.paired is None or outcome is None
        else {**_paired_record(comparison.paired), "outcome": outcome.value},
    }


def _judged_record(judged: Judged) -> dict[str, Any]:
    return {
        **asdict(judged.expectation),
        "over": judged.over,
        "at": judged.swept,
        **_paired_record(judged.paired),
        "outcome": judged.held.value,
    }


def _paired_record(paired: Paired) -> dict[str, Any]:
    return {
        "num_pairs": paired.num_pairs,
        "num_missing": paired.num_missing,
        "difference": paired.difference._asdict(),
        "ratio": None if paired.ratio is None else paired.ratio._asdict(),
    }
