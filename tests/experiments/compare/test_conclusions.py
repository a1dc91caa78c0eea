"""Conclusions of a comparison: verdicts, expectations, tables and captions."""

from __future__ import annotations

import math
import re
from io import StringIO

import pandas as pd
import pytest
from rich.console import Console

from experiments.compare.page import figure
from experiments.compare.results import evaluate
from experiments.compare.sentences import caveats, verdicts
from experiments.compare.settings import Expectation, Experiment, Sweep
from experiments.compare.tables import MARKS, metric_rows, print_results
from experiments.study.figures import Metric, figures, label_of, unit_of
from experiments.study.runs import Runs
from sim.metrics.confidence import Held, Outcome
from sim.report.numbers import with_interval

NAN = math.nan


def make_experiment(**settings) -> Experiment:
    given = {
        "title": "Made up",
        "claim": "b is better.",
        "arms": {"a": (), "b": ()},
        "baseline": "a",
        "metrics": (Metric(key="throughput.output_tokens_per_s", better="higher"),),
        "seeds": (0, 1, 2),
    }
    return Experiment(**{**given, **settings})


def table_of(experiment: Experiment, **values: list[float]) -> pd.DataFrame:
    """Runs of arms without a sweep: arm=[the first metric's value at each seed]."""
    key = experiment.metrics[0].key
    return pd.DataFrame(
        [
            {"arm": arm, "seed": seed, "swept": None, key: value}
            for arm, of_arm in values.items()
            for seed, value in zip(experiment.seeds, of_arm, strict=False)
        ]
    )


def evaluated(experiment: Experiment, *, interrupted: bool = False, **values: list[float]):
    return evaluate(experiment, Runs(table=table_of(experiment, **values), interrupted=interrupted))


def test_a_clear_difference_is_a_victory_or_a_defeat():
    experiment = make_experiment()
    # ln of 4, 4.1, 4.033: mean 1.3973, s = 0.01257, half width 4.3027 s / sqrt(3) = 0.03122
    found = evaluated(experiment, a=[10, 20, 30], b=[40, 82, 121])
    assert verdicts(found) == [
        "b beats a: output tokens/s ×4.04 (95 % interval 3.92 to 4.17, 3 paired seeds)"
    ]
    lower = make_experiment(metrics=(Metric(key="ttft.p99_s", better="lower"),))
    (sentence,) = verdicts(evaluated(lower, a=[0.1, 0.2, 0.3], b=[0.4, 0.82, 1.21]))
    assert sentence.startswith("b loses to a: TTFT p99 ×4.04 ")


def test_noise_is_said_to_be_noise():
    (sentence,) = verdicts(evaluated(make_experiment(), a=[10, 11, 9], b=[11, 9, 10]))
    assert re.fullmatch(r"b against a: output tokens/s, no difference beyond noise, .* −\d.*", sentence)


def test_figures_that_reach_zero_are_compared_by_difference():
    experiment = make_experiment(metrics=(Metric(key="preemptions", better="lower"),))
    (sentence,) = verdicts(evaluated(experiment, a=[10, 11, 12], b=[0, 0, 0]))
    assert sentence == "b beats a: preemptions −11.0 (95 % interval −13.5 to −8.5, 3 paired seeds)"


def test_one_seed_gives_means_but_no_verdict():
    experiment = make_experiment(seeds=(0,), expect=(expectation(at_least_ratio=2),))
    found = evaluated(experiment, a=[10], b=[40])
    assert verdicts(found) == [
        "Expected: output tokens/s of b at least ×2 that of a: "
        "not decided (×4.00, one seed gives no interval)",
        "b against a: no verdict on output tokens/s; only one seed has a value in both arms",
    ]
    assert caveats(found) == [
        "One seed gives no confidence interval, so differences cannot be distinguished from noise; use "
        "at least two seeds."
    ]


def expectation(**settings) -> Expectation:
    return Expectation(**{"metric": "throughput.output_tokens_per_s", "arm": "b", **settings})


def test_expectations_are_judged_between_any_two_arms():
    arms = {"a": (), "b": (), "c": ()}
    asked = (expectation(over="c", at_most_ratio=0.5), expectation(at_least_ratio=3))
    experiment = make_experiment(arms=arms, expect=asked)
    found = evaluated(experiment, a=[10, 20, 30], b=[20, 40, 60], c=[60, 120, 180])
    assert [judged.held for judged in found.judged] == [Held.HELD, Held.MISSED]
    assert verdicts(found)[:2] == [
        "Expected: output tokens/s of b at most ×0.5 that of c: held (×0.333 in every seed)",
        "Expected: output tokens/s of b at least ×3 that of a: not held (×2.00 in every seed)",
    ]


def swept_results():
    experiment = make_experiment(sweep=Sweep(key="rate", values=(1, 2, 4)), seeds=(0, 1))
    key = experiment.metrics[0].key
    factors = {1: (1.0, 1.0), 2: (0.5, 0.5), 4: (2.0, 3.0)}
    rows = [
        {"arm": arm, "seed": seed, "swept": value, key: 10.0 * (factors[value][seed] if arm == "b" else 1)}
        for seed in experiment.seeds
        for value in experiment.swept
        for arm in experiment.arms
    ]
    return evaluate(experiment, Runs(table=pd.DataFrame(rows)))


def test_a_swept_verdict_says_where():
    # At 4 the ratios 2 and 3 of two seeds: t(1) = 12.7 makes the interval reach below 1.
    found = swept_results()
    assert [c.outcome for c in found.of(found.experiment.metrics[0], "b")] == [
        Outcome.EQUAL,
        Outcome.WORSE,
        Outcome.NO_DIFFERENCE,
    ]
    assert verdicts(found) == [
        "b against a over rate: output tokens/s worse at 2 (×0.500); no difference beyond noise at 1, 4"
    ]


@pytest.mark.parametrize(("width", "num_tables"), [(100, 1), (24, 2)])
def test_every_mean_of_a_sweep_has_its_interval_in_as_many_tables_as_it_takes(width, num_tables):
    console = Console(file=StringIO(), width=width)
    print_results(swept_results(), console)
    printed = console.file.getvalue()
    rows = [line.split() for line in printed.splitlines() if re.match(r" [124] ", line)]
    assert len(rows) == 3 * num_tables * len(swept_results().experiment.metrics)
    found = swept_results()
    for metric in found.experiment.metrics:
        for one in found.of(metric, "b"):
            assert f"{with_interval(one.mean, unit_of(metric)[0])} {MARKS[one.outcome].strip()}" in printed


def test_a_sweep_is_drawn_as_lines_with_bands_and_arms_alone_as_bars():
    lines = figure(swept_results())
    assert [trace.type for trace in lines.data] == ["scatter"] * 4
    assert list(lines.data[3].x) == [1, 2, 4]
    assert list(lines.data[3].y) == pytest.approx([10, 5, 25])
    bars = figure(evaluated(make_experiment(), a=[1, 2, 3], b=[2, 3, 4]))
    assert [(trace.type, list(trace.y)) for trace in bars.data] == [("bar", [2]), ("bar", [3])]
    # t(2, 0.975) / sqrt(3) = 4.3027 / 1.7321
    assert list(bars.data[0].error_y.array) == pytest.approx([2.4841], abs=1e-4)


def test_traffic_that_was_clipped_apart_is_called_so():
    experiment = make_experiment()
    table = table_of(experiment, a=[1, 2, 3], b=[2, 3, 4])
    for clipped, said in (([2, 2, 1, 1, 0, 0], 0), ([2, 2, 1, 0, 0, 0], 1)):
        # Rows are the arms' in turn; of each seed both arms must have clipped as many.
        by_seed = table.sort_values("seed").assign(**{"workload.num_clipped": clipped})
        assert len(caveats(evaluate(experiment, Runs(table=by_seed)))) == 1 + said


def test_latencies_are_shown_in_milliseconds_and_shares_in_percent():
    metrics = (Metric(key="ttft.p99_s", better="lower"), Metric(key="kv.peak_use_share", better="lower"))
    experiment = make_experiment(metrics=metrics)
    table = table_of(experiment, a=[0.1] * 3, b=[0.2] * 3).assign(**{"kv.peak_use_share": 0.5})
    found = evaluate(experiment, Runs(table=table))
    heading, *rows = metric_rows(found, metrics[0])
    assert heading == ["arm", "mean", "±", "over a", "95 % interval", "seeds", "verdict"]
    assert rows == [
        ["a", "100", "–", "", "", "3", ""],
        ["b", "200", "–", "×2.00", "–", "3", "worse"],
    ]
    assert metric_rows(found, metrics[1])[1][:2] == ["a", "50.0"]


@pytest.mark.parametrize(
    ("key", "label"),
    [
        ("ttft.p99_s", "TTFT p99"),
        ("throughput.output_tokens_per_s", "output tokens/s"),
        ("goodput.requests_per_s", "goodput requests/s"),
        ("memory.kv_bytes_per_token", "memory kv bytes per token"),
        ("iterations.mean_batch_seqs", "mean batch size (sequences)"),
        ("iterations.max_batch_seqs", "max batch size (sequences)"),
        ("mfu", "MFU"),
    ],
)
def test_labels_follow_from_keys(key, label):
    assert label_of(Metric(key=key, better="lower")) == label


@pytest.mark.parametrize("width", [60, 100])
@pytest.mark.parametrize("found", [swept_results(), evaluated(make_experiment(), a=[1e7] * 3, b=[2e7] * 3)])
def test_no_figure_is_cut_on_a_narrow_terminal(found, width):
    console = Console(file=StringIO(), width=width)
    print_results(found, console)
    assert "…" not in console.file.getvalue()


def test_a_summary_is_flattened_to_its_numbers():
    summary = {"a": {"b": 1, "c": None, "d": "text", "e": [1]}, "f": True, "goodput": None, "g": 2.5}
    flat = figures(summary)
    assert list(flat) == ["a.b", "a.c", "f", "g"]
    assert flat["a.b"] == 1.0
    assert math.isnan(flat["a.c"])
    assert flat["f"] == 1.0
