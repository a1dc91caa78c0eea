"""Settings of a comparison that are refused before anything runs."""

from __future__ import annotations

import re

import pytest

from experiments.app.cli import main
from experiments.app.settings.compose import ConfigSource, resolved
from experiments.app.settings.config_groups import CONFIG_DIR, first_comment
from experiments.compare.settings import build_settings
from tests.experiments.compare.own_experiment import SHIPPED, TINY, arms_of, compare


@pytest.mark.parametrize("own", [True, False])
def test_without_a_setting_the_experiments_are_listed(folder, capsys, own):
    """The user's experiments are listed as well."""
    with pytest.raises(SystemExit) as exit_:
        main(["compare", *(["--config-dir", str(folder / "own")] if own else [])])
    assert exit_.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("usage: windtunnel compare experiment=NAME [key=value ...]")
    words = " ".join(printed.split())
    for path in SHIPPED:
        assert f"{path.stem} {first_comment(path)}" in words
    assert ("tiny A few requests on a small model" in words) is own
    assert not list((folder / "here").iterdir())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (['experiment.arms.mine=["batching=chunkd"]'], "arm mine: batching=chunkd: .* nearest: chunked"),
        (
            ['experiment.arms.mine=["batching.max_num_batched_token=512"]'],
            "arm mine: batching.max_num_batched_token: .* nearest: batching.max_num_batched_tokens",
        ),
        (
            ['experiment.arms.mine=["batching.max_num_batched_tokens=0"]'],
            "arm mine: batching.max_num_batched_tokens=0: must be >= 1",
        ),
        (['experiment.arms.mine=["+batchin.x=1"]'], "arm mine: batchin.x: no such"),
        (['experiment.arms.mine=["batching"]'], "experiment.arms.mine=batching: must be key=value"),
        (['experiment.arms.mine=["seed=3"]'], "arms.mine=seed: .* the list of seeds sets them"),
        (['also=["batching=typo"]'], "also: batching=typo: no such choice; .*windtunnel list batching"),
        (['experiment.base=["batching=typo"]'], "experiment.base: batching=typo: no such choice"),
        (['also=["output.report=true"]'], "also=output.report: must not be set here"),
        (
            ['experiment.arms.mine=["load=2"]'],
            "arm mine: load=2: must be 1 as in arm chunked, because arms are",
        ),
        (
            ['experiment.arms.mine=["workload.num_requests=31"]'],
            "arm mine: workload.num_requests=31: must be 30 as in arm chunked",
        ),
        (["experiment.baseline=chunke"], "experiment.baseline=chunke: .* nearest: chunked"),
        (["experiment.seeds=[]"], r"experiment.seeds=\[\]: must contain at least one seed"),
        (["experiment.seeds=[1,1]"], r"experiment.seeds=\[1, 1\]: must be distinct"),
        (["experiment.seeds=[-1]"], "experiment.seeds=-1: must be >= 0"),
        (["experiment.seeds=3"], "experiment.seeds=3: must be a list"),
        (
            ["experiment.expect=[]", "experiment.metrics=[{key: ttft.p98_s, better: lower}]"],
            r"metrics\[0\].key=ttft.p98_s: no such figure .* nearest: ttft.p9",
        ),
        (
            ["experiment.expect=[]", "experiment.metrics=[{key: by_priority.0.ttft.p98_s, better: lower}]"],
            r"metrics\[0\].key=by_priority.0.ttft.p98_s: no such figure in summary.json",
        ),
        (
            [
                "experiment.metrics=[{key: goodput.share, better: higher}]",
                "experiment.expect=[]",
                'also=["slo=none"]',
            ],
            "goodput.share: no such figure in summary.json with slo=none",
        ),
        (
            ["experiment.metrics=[{key: mfu, better: more}]"],
            r"experiment.metrics\[0\].better=more: must be one of higher, lower",
        ),
        (["experiment.metrics=[{key: mfu, beter: higher}]"], r"metrics\[0\].beter: no such setting"),
        (["experiment.expect=[{metric: ttft.mean_s, arm: mine}]"], r"expect\[0\].*at least one must be set"),
        (
            ["experiment.expect=[{metric: mfu, arm: mine, at_least_ratio: 2}]"],
            r"experiment.expect\[0\].metric=mfu: is not in the experiment",
        ),
        (["experiment.sweep={key: workload.raid, values: [1]}"], "arm chunked: workload.raid: no such"),
        (["experiment.sweep={key: replicas, values: []}"], r"experiment.sweep.values=\[\]: must contain"),
        (["experiment.sweep={key: seed, values: [1]}"], "sweep.key=seed: must not be set here"),
        (
            ["experiment.sweep={key: replicas, values: [1, 0]}"],
            "arm chunked at replicas=0: replicas=0: must be >= 1",
        ),
        (["jobs=0"], "jobs=0: must be >= 1, or null for one per core"),
        (["experiment.arm=1"], "experiment.arm: no such setting; nearest: experiment.arms"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_settings_exit_2_before_anything_runs(folder, overrides, message, capsys):
    (folder / "own/experiment/tiny.yaml").write_text(TINY.replace("batching=mine", "batching=static"))
    assert compare(folder, *overrides) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert error.count("\n") == 1
    assert not (folder / "out").exists()
    assert not list((folder / "here").iterdir())


def test_an_unknown_choice_of_a_users_folder_leaves_nothing_behind(folder, capsys):
    assert compare(folder, 'experiment.arms.mine=["batching=mien"]') == 2
    assert "arm mine: batching=mien: no such choice; nearest: mine" in capsys.readouterr().err
    assert not (folder / "out").exists()


def test_a_misspelt_experiment_is_named(folder, capsys):
    assert compare(folder, experiment="tinny") == 2
    assert "experiment=tinny: no such choice; nearest: tiny" in capsys.readouterr().err


def test_a_swept_setting_changed_in_place_is_as_if_composed(folder):
    source = ConfigSource(config_name="compare", dirs=[CONFIG_DIR, folder / "own"])
    sweep = "experiment.sweep={key: batching.max_num_batched_tokens, values: [64, 128]}"
    cfg = source.compose(["experiment=tiny", 'experiment.arms.mine=["batching=prefill_first"]', sweep])
    arms = arms_of(cfg, source.dirs)
    (point,) = [p for p in arms if (p.arm, p.swept) == ("mine", 128)]
    composed = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]).compose_plain(
        [*cfg.experiment.base, "batching=prefill_first", "batching.max_num_batched_tokens=128"]
    )
    assert point.with_seed(0) == composed


def test_choices_of_a_group_can_be_swept(folder):
    source = ConfigSource(config_name="compare", dirs=[CONFIG_DIR, folder / "own"])
    sweep = "experiment.sweep={key: scheduling, values: [fcfs, priority]}"
    arms = arms_of(source.compose(["experiment=tiny", sweep]), source.dirs)
    assert [p.config["scheduling"]["_target_"].rpartition(".")[2] for p in arms[:2]] == ["Fcfs", "Priority"]


def test_interpolations_in_an_experiment_are_resolved(folder):
    source = ConfigSource(config_name="compare", dirs=[CONFIG_DIR, folder / "own"])
    settings = build_settings(
        resolved(source.compose(["experiment=tiny", "experiment.title=${experiment.baseline}"]))
    )
    assert settings.experiment.title == "chunked"
