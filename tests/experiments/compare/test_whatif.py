"""windtunnel whatif: one change at a time on the same traffic; what does not apply is reported."""

import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.app.cli import main
from experiments.compare.results import Comparison, evaluate
from experiments.compare.settings import Experiment
from experiments.compare.whatif.arms import Questions, build_questions
from experiments.compare.whatif.offered import OFFERED, Baseline, DoesNotApply
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
from sim.metrics.paired import compare_paired, mean_interval
from sim.settings.build import build_as
from sim.settings.compose import ConfigSource
from sim.settings.config_groups import CONFIG_DIR
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run

SOURCE = ConfigSource(config_name="whatif", dirs=[CONFIG_DIR])
SIMULATE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
SMALL = ("model=smollm2_135m", "hardware=l4", "workload=poisson", "workload.num_requests=60")
SHARE = Metric(key="goodput.share", better="higher", label="SLO attainment")
TTFT = Metric(key="ttft.p99_s", better="lower")
COST = Metric(key="cost.usd_per_hour", better="lower", label="$/hour")


def questions_of(*overrides):
    given_all = [*SMALL, *overrides]
    return build_questions(SOURCE.compose(given_all), SOURCE, given_all)


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
        found=evaluate(experiment, table, interrupted=False),
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
        ["baseline", "98.0 ±2.5", "200 ±248", "memory bandwidth"],
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
        ([1.1, 2.0, 3.0], "+3.2 ±15.1"),  # geometric mean 1.1^(1/3), its bounds exp(ln 1.1/3 ± 4.303 s/√3)
        ([0.0, 2.0, 3.0], "−333.3 ±1,434.2"),  # no ratio of nothing: ms
    ],
)
def test_a_change_is_shown_in_percent_as_a_factor_or_as_a_difference(values, text):
    assert delta_text(compared(values, [1.0, 2.0, 3.0])) == text


def test_a_share_changes_in_points_and_one_seed_has_no_interval():
    assert delta_text(compared([0.5, 0.6], [0.9, 0.9], SHARE)) == "−35.0 ±63.5"
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


def test_one_gpu_is_offered_what_applies_and_the_rest_is_reported():
    found = questions_of("caching=paged")
    assert list(found.experiment.arms.items()) == [
        ("baseline", ()),
        ("double the traffic", ("load=2",)),
        ("prompts twice as long", ("prompt_scale=2",)),
        ("GPU: l40s", ("hardware=l40s",)),
        ("FP8 weights", ("model.weights=fp8",)),
        ("prefix cache on", ("caching=prefix",)),
        ("one more replica", ("replicas=2",)),
    ]
    assert found.left_out == {
        "replica_less": "there is only one replica",
        "half_fail": "there is only one replica",
    }


def test_every_second_replica_of_several_fails_in_the_middle_of_the_traffic():
    found = questions_of("replicas=5", "whatif.offered=[half_fail,replica_less]")
    (_, half, less) = found.points
    (event,) = half.config["failures"]["events"]
    assert event["replicas"] == [1, 3]
    assert event["at_s"] == pytest.approx(60 / 8 / 2, rel=0.3)
    assert less.config["replicas"] == 4


@pytest.mark.parametrize(
    ("overrides", "name", "reason"),
    [
        (["hardware=a100_80gb_sxm"], "fp8", "does not compute in fp8"),
        (["model=gpt_oss_20b", "model.weights=fp8", "hardware=h100_sxm"], "fp8", "are already fp8"),
        (["hardware=b200_sxm"], "faster_gpu", "has more memory bandwidth than"),
        (["workload=closed_loop"], "more_traffic", "the workload has no request rate"),
        (
            ["workload=closed_loop", "replicas=2"],
            "half_fail",
            "the end of the traffic is not known in advance",
        ),
        (["replicas=2", "failures=crash"], "half_fail", "the baseline already has failures"),
        (["pools=two_gpus"], "replica_more", "the baseline has pools"),
        (["pools=two_gpus"], "faster_gpu", "the baseline has pools"),
        (["scaling=concurrency"], "replica_more", "autoscaling sets"),
    ],
)
def test_what_the_baseline_does_not_admit_is_left_out_with_the_reason(overrides, name, reason):
    scenario, source = build_run(SIMULATE.compose([*SMALL, *overrides]))
    baseline = Baseline(scenario=scenario, source=source, bandwidth_by_gpu=lambda gpu: 1e12)
    with pytest.raises(DoesNotApply, match=reason):
        OFFERED[name](baseline)


def test_offered_overrides_that_cannot_be_run_are_left_out_with_the_reason():
    found = questions_of("whatif.offered=['big: model=llama3_1_405b','output_scale=2']")
    assert "llama-3.1-405b" in found.left_out["big"]
    assert list(found.experiment.arms) == ["baseline", "output_scale=2"]


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["usual", "growth", "gpus", "policies"])
def test_every_shipped_list_can_be_asked(choice):
    found = questions_of(f"whatif={choice}")
    assert len(found.points) >= 5


def test_the_first_requests_of_a_long_workload_are_enough_unless_its_number_is_set():
    changes = "whatif.changes=['workload.num_requests=70','load=2']"
    long = ["workload=synthetic", "whatif.requests=50", changes]
    found = build_questions(SOURCE.compose(long), SOURCE, long)
    assert found.num_requests == 50
    assert [point.config["workload"]["num_requests"] for point in found.points] == [50, 70, 50]
    whole = questions_of("whatif.changes=['load=2']", "whatif.requests=50")
    assert whole.num_requests is None
    assert [point.config["workload"]["num_requests"] for point in whole.points] == [60, 60]


def test_a_change_of_the_workload_is_reported_as_one():
    assert questions_of(
        "whatif.changes=['longer: workload.lengths.prompt_tokens.value=900','load=2']"
    ).other_traffic == ["longer"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["whatif.changes=['lod=2']"], r"^whatif.changes\[0\]: lod=2: lod: no such"),
        (
            ["whatif.changes=['gpu: hardware=h20']"],
            r"^whatif.changes\[0\]: gpu: hardware=h20: no such choice",
        ),
        (["whatif.changes=['huge: model=llama3_1_405b']"], r"^whatif.changes\[0\]: huge: "),
        (["seed=5"], r"^seed=5: must not be set here; whatif.seeds sets the seeds, .*whatif.seeds=\[5\]$"),
        (["++seed=5"], "^seed=5: must not be set here"),
        (["sim.stop_overloaded=true"], "^sim.stop_overloaded=true: must be false.*whatif.requests"),
        (
            ["whatif.changes=['sim.stop_overloaded=true']"],
            r"^whatif.changes\[0\]: sim.stop_overloaded=true: .*must be false",
        ),
        (["whatif.offered=[replica_less]"], "^whatif.offered: no change applies to the baseline"),
    ],
)
def test_what_cannot_be_run_is_refused_with_its_place(overrides, message):
    with pytest.raises(ConfigError, match=message):
        questions_of(*overrides)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"changes": ["load"]}, r"^whatif.changes\[0\]=load: must be key=value"),
        ({"changes": ["nothing: "]}, r"^whatif.changes\[0\]=nothing: must contain an override"),
        ({"changes": ["a: load=2", "a: load=3"]}, "^whatif.changes=.*must have different names"),
        ({"changes": ["baseline: load=2"]}, "^whatif.changes=baseline: is the name of"),
        ({"changes": ["s: seed=3"]}, r"^whatif.changes\[0\]=seed: must not be set here; whatif.seeds"),
        (
            {"offered": ["fp4"]},
            "^whatif.offered=fp4: is neither a change nor an override key=value; nearest: fp8",
        ),
        ({"offered": []}, r"^whatif.changes=\[\]: must contain a change"),
        ({"seeds": []}, r"^whatif.seeds=\[\]: must contain at least one seed"),
        ({"seeds": [1, 1]}, r"^whatif.seeds=\[1, 1\]: must be distinct"),
        ({"requests": 3}, "^whatif.requests=3: must be >= 10"),
        ({"jobs": 0}, "^whatif.jobs=0: must be >= 1"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_key_value_and_rule(settings, message):
    with pytest.raises(ConfigError, match=message):
        build_as(WhatifSettings, settings, "whatif")


def test_names_of_what_is_offered_are_those_of_the_settings():
    assert WhatifSettings().offered == tuple(OFFERED)


def test_changes_are_run_and_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    overrides = [
        *SMALL,
        "whatif.changes=['double: load=2','dear: hardware=l40s','same: load=1']",
        "whatif.seeds=[0,1]",
        "whatif.jobs=1",
        "hydra.run.dir=out",
    ]
    assert main(["whatif", *overrides]) == 0
    printed = capsys.readouterr().out
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    lines = printed.splitlines()
    first = lines.index("double (load=2)") + 1
    said = [line.removeprefix("double: ") for line in summary["verdicts"] if line.startswith("double: ")]
    assert [line.strip() for line in lines[first : first + len(said)]] == said
    by_arm = {(c["arm"], c["metric"]): c for c in summary["comparisons"]}
    # The same requests in half the time.
    assert by_arm["double", "throughput.output_tokens_per_s"]["against_baseline"]["ratio"]["mean"] > 1.3
    dear = by_arm["dear", "cost.usd_per_hour"]["against_baseline"]
    assert dear["outcome"] == "worse"
    assert by_arm["same", "ttft.p99_s"]["against_baseline"]["outcome"] == "equal in every seed"
    assert any(line.startswith("same: No difference beyond noise: ") for line in summary["verdicts"])
    assert any(line.startswith("Too short for goodput (") for line in summary["caveats"])
    runs = pd.read_parquet(tmp_path / "out/runs.parquet")
    assert len(runs) == 4 * 2
    shares = runs.filter(like="limits.").fillna(0).sum(axis=1)
    assert shares.to_numpy() == pytest.approx(1)
    assert set(summary["limits"]) == {"baseline", "double", "dear", "same"}
    page = (tmp_path / "out/whatif.html").read_text()
    for heading in ("Compared with the baseline", "Time of the requests", "Settings that differ"):
        assert heading in page


def test_a_wrong_change_ends_the_command_with_its_place(capsys):
    assert main(["whatif", *SMALL, "whatif.changes=['oops: hardware=h10']"]) == 2
    assert "whatif.changes[0]: oops: hardware=h10: no such choice" in capsys.readouterr().err
