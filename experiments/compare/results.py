"""Computes comparisons between arms, and judges expectations, from the table of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from experiments.compare.settings import Expectation, Experiment
from experiments.study.figures import Metric
from sim.metrics.paired import Held, Interval, Outcome, Paired, compare_paired, judge_ratio, mean_interval
from sim.metrics.summary import plain_json

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
    comparisons: tuple[Comparison, ...]
    judged: tuple[Judged, ...]
    num_runs: int
    interrupted: bool
    clipped_apart: bool
    """True if arms truncated different numbers of the same requests, as their context lengths differ."""

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
                "interrupted": self.interrupted,
                "runs": {"done": self.num_runs, "asked": experiment.num_runs},
                "baseline": experiment.baseline,
                "verdicts": list(sentences),
                "expectations": [_judged_record(judged) for judged in self.judged],
                "comparisons": [_comparison_record(comparison) for comparison in self.comparisons],
            }
        )
        return record


def evaluate(experiment: Experiment, runs: pd.DataFrame, *, interrupted: bool) -> Results:
    """Compares the arms and judges the expectations.

    `runs` has the columns arm, seed and swept, and one column per metric. Seeds without a value in both arms
    are left out of the pairs.
    """
    comparisons = tuple(
        Comparison(
            metric=metric,
            arm=arm,
            swept=value,
            mean=mean_interval(_values(experiment, runs, metric.key, arm, i)),
            paired=None
            if arm == experiment.baseline
            else _paired(experiment, runs, metric.key, arm, experiment.baseline, i),
        )
        for metric in experiment.metrics
        for i, value in enumerate(experiment.swept)
        for arm in experiment.arms
    )
    judged = tuple(
        _judge(experiment, runs, expectation, i)
        for expectation in experiment.expect
        for i, value in enumerate(experiment.swept)
        if expectation.at is None or expectation.at == value
    )
    return Results(
        experiment=experiment,
        comparisons=comparisons,
        judged=judged,
        num_runs=len(runs),
        interrupted=interrupted,
        clipped_apart=_clipped_apart(runs),
    )


def _clipped_apart(runs: pd.DataFrame) -> bool:
    if CLIPPED not in runs:
        return False
    of_traffic = runs.groupby(["seed", "swept"], dropna=False)[CLIPPED]
    return bool((of_traffic.nunique() > 1).any())


def _judge(experiment: Experiment, runs: pd.DataFrame, expectation: Expectation, index: int) -> Judged:
    over = expectation.over or experiment.baseline
    paired = _paired(experiment, runs, expectation.metric, expectation.arm, over, index)
    return Judged(
        expectation=expectation,
        over=over,
        swept=experiment.swept[index],
        paired=paired,
        held=judge_ratio(
            paired.ratio, at_least=expectation.at_least_ratio, at_most=expectation.at_most_ratio
        ),
    )


def _paired(experiment: Experiment, runs: pd.DataFrame, key: str, arm: str, over: str, index: int) -> Paired:
    return compare_paired(
        _values(experiment, runs, key, arm, index), _values(experiment, runs, key, over, index)
    )


def _values(experiment: Experiment, runs: pd.DataFrame, key: str, arm: str, index: int) -> list[float]:
    """Returns the metric for each seed of the experiment; NaN if the run or the value does not exist."""
    mine = runs[runs["arm"] == arm]
    if experiment.sweep is not None:
        mine = mine[mine["swept"] == experiment.swept[index]]
    by_seed = dict(zip(mine["seed"], mine[key], strict=True)) if key in mine else {}
    return [float(by_seed.get(seed, math.nan)) for seed in experiment.seeds]


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
