"""The answers of whatif: sentences, tables and figures of given outcomes."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.compare.results import Comparison, evaluate
from experiments.compare.settings import Experiment
from experiments.compare.whatif.arms import Questions
from experiments.compare.whatif.page import delta_figure, limit_figure
from experiments.compare.whatif.sentences import (
    Answers,
    caveats,
    delta_text,
    left_out,
    limits_by_arm,
    times_by_arm,
    value_text,
    verdicts,
)
from experiments.compare.whatif.settings import WhatifSettings
from experiments.compare.whatif.tables import tables
from experiments.study.figures import Metric
from experiments.study.runs import Runs
from sim.metrics.confidence import compare_paired, mean_interval

SHARE = Metric(key="goodput.share", better="higher", label="SLO attainment")
TTFT = Metric(key="ttft.p99_s", better="lower")
COST = Metric(key="cost.usd_per_hour", better="lower", label="$/hour")


def answers_of(runs, **more):
    """Returns the answers of given runs: arm -> metric key -> values by seed."""
    arms = {arm: () if arm == "baseline" else ("load=2",) for arm in runs}
    seeds = tuple(range(len(next(iter(next(iter(runs.values())).values())))))
    rows = [
        {"arm": arm, "seed": seed, "swept": None, **{key: values[seed] for key, values in figures.items()}}
        for arm, figures in runs.items()
        for seed in seeds
    ]
    table = pd.DataFrame(rows)
    metrics = tuple(m for m in (SHARE, TTFT, COST) if m.key in table)
    experiment = Experiment(
        title="What if", claim="", arms=arms, baseline="baseline", metrics=metrics, seeds=seeds
    )
    questions = Questions(
        settings=WhatifSettings(seeds=seeds),
        experiment=experiment,
        points=[],
        targets=dict.fromkeys(runs, 0.9),
        left_out=more.get("left_out", {}),
        other_traffic=more.get("other_traffic", []),
        num_requests=more.get("num_requests"),
        arrivals=more.get("arrivals", {}),
    )
    return Answers(
        questions=questions,
        found=evaluate(experiment, Runs(table=table)),
        limits=limits_by_arm(table),
        times_s=times_by_arm(table),
    )


TWICE = {
    "baseline": {
        "goodput.share": [0.99, 0.97, 0.98],
        "ttft.p99_s": [0.1, 0.2, 0.3],
        "cost.usd_per_hour": [2.0, 2.0, 2.0],
        "limits.compute": [0.2, 0.2, 0.2],
        "limits.memory bandwidth": [0.8, 0.8, 0.8],
    },
    "twice": {
        "goodput.share": [0.79, 0.77, 0.78],
        "ttft.p99_s": [0.3, 0.6, 0.9],
        "cost.usd_per_hour": [2.0, 2.0, 2.0],
        "limits.compute": [0.6, 0.6, 0.6],
        "limits.memory bandwidth": [0.4, 0.4, 0.4],
    },
}


def compared(values, baseline, metric=TTFT):
    return Comparison(
        metric=metric,
        arm="a",
        swept=None,
        mean=mean_interval(values),
        paired=compare_paired(values, baseline),
    )


def test_each_changed_outcome_has_a_sentence():
    assert verdicts(answers_of(TWICE)) == [
        "twice: The SLO is now missed: attainment falls from 98 % to 78 % (target 90 %).",
        "twice: TTFT p99 rises to 3.00 times its value, from 200 ms to 600 ms (worse).",
        "twice: No difference beyond noise: cost per hour.",
        "twice: The limit is compute, 60 % of the requests' time (before: memory bandwidth, 80 %).",
    ]


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ([0.8, 0.8], [0.95, 0.95], "The SLO is now met: attainment rises from 80 % to 95 % (target 90 %)."),
        ([0.99, 0.99], [0.99, 0.99], "The SLO is still met: attainment stays at 99 % (target 90 %)."),
        (
            [0.3, 0.3],
            [0.2, 0.2],
            "The SLO is still missed: attainment falls from 30 % to 20 % (target 90 %).",
        ),
        (
            [0.95, 0.93],
            [0.9, 0.94],
            "The SLO is still met: attainment is 92 %, no difference beyond noise from 94 % (target 90 %; "
            "its interval contains the target).",
        ),
        ([0.95], [0.92], "The SLO is still met: attainment is 92 %, before 95 % (target 90 %)."),
    ],
)
def test_the_slo_is_still_or_now_met_or_missed(before, after, sentence):
    runs = {"baseline": {"goodput.share": before}, "new": {"goodput.share": after}}
    assert verdicts(answers_of(runs))[0] == f"new: {sentence}"


def test_amounts_carry_their_units_and_one_seed_gives_no_verdict():
    runs = {
        "baseline": {"ttft.p99_s": [0.1, 0.1], "cost.usd_per_hour": [2.0, 2.0]},
        "new": {"ttft.p99_s": [0.08, 0.08], "cost.usd_per_hour": [2.5, 2.5]},
    }
    assert verdicts(answers_of(runs)) == [
        "new: TTFT p99 falls by 20.0 %, from 100 ms to 80.0 ms (better).",
        "new: Cost per hour rises by 25.0 %, from $2.00 to $2.50 (worse).",
    ]
    one = {arm: {key: values[:1] for key, values in figures.items()} for arm, figures in runs.items()}
    assert verdicts(answers_of(one)) == ["new: One seed gives no verdict on figures."]


def test_runs_too_short_for_goodput_are_named_with_the_requests_needed():
    runs = {
        arm: {"goodput.share": [0.99] * 2, "simulated_s": [ends_s] * 2, "e2e.p90_s": [e2e_s] * 2}
        for arm, ends_s, e2e_s in (("baseline", 102.0, 5.0), ("slow", 110.0, 20.0))
    }
    arrivals = dict.fromkeys(runs, (1000, 100.0))
    lines = [
        line
        for line in caveats(answers_of(runs, arrivals=arrivals, num_requests=1000))
        if line.startswith("Too short")
    ]
    assert lines == [
        "Too short for goodput (slow): the traffic lasts less than 10 times the p90 of E2E, so an overload "
        "may not show; at least 2,000 requests are needed, so set whatif.requests=2000.",
        "Too short for goodput (slow): more than 5 % of the run comes after the last arrival, which lowers "
        "goodput; at least 1,900 requests are needed, so set whatif.requests=1900.",
    ]
    assert not any("Too short" in line for line in caveats(answers_of(runs)))  # without a request rate


def test_tables_have_the_baselines_figures_and_the_changes_of_them():
    first, second = tables(answers_of(TWICE))
    assert first == [
        ["", "SLO attainment, %", "TTFT p99, ms", "limited by"],
        ["baseline", "98.0 ±2.5", "200 ±250", "memory bandwidth"],
        ["twice", "−20.0 -", "×3.00 -", "compute"],
    ]
    assert second == [["", "$/hour"], ["baseline", "2.00"], ["twice", "="]]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([1.5, 3.0, 4.5], "+50.0"),  # exactly, in every seed
        ([0.5, 1.0, 1.5], "−50.0"),
        ([0.25, 0.5, 0.75], "×0.25"),
        ([1.0, 2.0, 3.0], "="),
        ([1.1, 2.0, 3.0], "+3 ±15"),  # geometric mean 1.1^(1/3), its bounds exp(ln 1.1/3 ± 4.303 s/√3)
        ([0.0, 2.0, 3.0], "−300 ±1,400"),  # no ratio of nothing: ms
    ],
)
def test_a_change_is_shown_in_percent_as_a_factor_or_as_a_difference(values, text):
    assert delta_text(compared(values, [1.0, 2.0, 3.0])) == text


def test_a_share_changes_in_points_and_one_seed_has_no_interval():
    assert delta_text(compared([0.5, 0.6], [0.9, 0.9], SHARE)) == "−40 ±60"
    assert delta_text(compared([2.2], [1.0])) == "×2.20"
    assert value_text(compared([0.119], [0.1])) == "119"
    assert delta_text(compared([float("nan")], [1.0])) == "–"


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=6), st.floats(0.01, 100))
def test_the_same_factor_in_every_seed_is_reported_without_doubt(baseline, factor):
    text = delta_text(compared([factor * value for value in baseline], baseline))
    assert "±" not in text
    if text.startswith("×"):
        assert not 0.5 <= factor < 2 or factor == pytest.approx(2)
        assert float(text[1:]) == pytest.approx(factor, abs=0.051)


def test_where_the_time_goes_is_a_mean_over_seeds_the_largest_first():
    table = pd.DataFrame({"arm": ["a", "a"], "limits.host": [0.1, np.nan], "limits.compute": [0.9, 1.0]})
    found = limits_by_arm(table)["a"]
    assert [(name, share.mean) for name, share in found.items()] == [
        ("compute", pytest.approx(0.95)),
        ("host", pytest.approx(0.05)),
    ]


def test_what_a_reader_must_know_is_said():
    answers = answers_of(TWICE, left_out={"fp8": "why"}, other_traffic=["twice"], num_requests=1000)
    assert left_out(answers) == ["fp8: left out, why"]
    reported = " ".join(caveats(answers))
    assert "first 1,000 requests" in reported
    assert "twice: the traffic differs from the baseline's" in reported
    assert "only 3 seeds" in reported


def test_figures_have_a_row_a_change_and_a_bar_a_resource():
    answers = answers_of(TWICE)
    dots = delta_figure(answers).data
    assert [dot.x[0] for dot in dots] == pytest.approx([-20, 3, 1])
    assert {dot.y[0] for dot in dots} == {"twice"}
    bars = {bar.name: list(bar.x) for bar in limit_figure(answers).data}
    assert bars["compute"] == pytest.approx([60, 20])  # from below
