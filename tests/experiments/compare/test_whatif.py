"""windtunnel whatif: one change at a time on the same traffic; what does not apply is reported."""

import json

import pandas as pd
import pytest

from experiments.app.cli import main
from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.compare.whatif.arms import build_questions
from experiments.compare.whatif.offered import OFFERED, Baseline, DoesNotApply
from experiments.compare.whatif.settings import WhatifSettings
from sim.settings.build import build_as
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run

SOURCE = ConfigSource(config_name="whatif", dirs=[CONFIG_DIR])
SIMULATE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
SMALL = ("model=smollm2_135m", "hardware=l4", "workload=poisson", "workload.num_requests=60")


def questions_of(*overrides):
    given_all = [*SMALL, *overrides]
    return build_questions(SOURCE.compose(given_all), SOURCE, given_all)


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
            ["whatif.changes=['gpu: hardware=h2000']"],
            r"^whatif.changes\[0\]: gpu: hardware=h2000: no such choice",
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
