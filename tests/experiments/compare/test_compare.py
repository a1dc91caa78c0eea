"""`windtunnel compare`: refused settings, conclusions and output files."""

from __future__ import annotations

import json
import math
import os
import re
import signal
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest
from omegaconf import OmegaConf
from rich.console import Console

from experiments.app import cli
from experiments.app.cli import main
from experiments.app.completion import candidates
from experiments.compare.arms import points
from experiments.compare.page import figure
from experiments.compare.results import evaluate
from experiments.compare.sentences import caveats, verdicts
from experiments.compare.settings import Expectation, Experiment, Sweep, build_settings
from experiments.compare.tables import MARKS, metric_rows, print_results
from experiments.study import runs
from experiments.study.figures import Metric, figures, label_of, unit_of
from experiments.study.runs import settings_that_differ
from hwmodels.iterations.iteration import UnknownIterationError
from sim.cluster.gateway import Gateway
from sim.metrics.paired import Held, Outcome
from sim.report.numbers import with_interval
from sim.settings.compose import ConfigSource
from sim.settings.config_groups import CONFIG_DIR, first_comment
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run
from sim.setup.scenario import Scenario

SHIPPED = sorted((CONFIG_DIR / "experiment").glob("*.yaml"))
LARGE = (
    "autoscaling_day",
    "disaggregation_long_inputs",
    "disaggregation_short_inputs",
    "fcfs_mlfq_s3_sjf",
    "lora_packed",
    "lora_thousands",
    "orca_vllm_sarathi_fastgen",
    "prefill_decode_interference",
    "replicas_against_tensor_parallel",
    "retry_storm",
    "tensor_parallel_links",
)
"""Whose arms take more than a second to compose."""
NAN = math.nan

TINY = """\
# A few requests on a small model
title: Tiny
claim: Longer chunks wait less.
base: [model=smollm2_135m, workload=poisson, workload.num_requests=30, "workload.arrivals.rate_per_s=200"]
arms:
  chunked: [batching=chunked]
  mine: [batching=mine]
baseline: chunked
metrics:
  - {key: ttft.mean_s, better: lower}
  - {key: throughput.output_tokens_per_s, better: higher}
seeds: [0, 1]
sweep: null
expect:
  - {metric: ttft.mean_s, arm: mine, at_least_ratio: 1.001}
"""

MINE = "# My own\n_target_: policies.batching.static.Static\nbatch_size: 4\n"


def arms_of(cfg, dirs):
    """Composes and builds every arm of a comparison."""
    return points(build_settings(cfg), ConfigSource(config_name="simulate", dirs=dirs))


def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes to an empty folder beside a user's own experiment `tiny` and batching policy `mine`."""
    for name, text in (("experiment/tiny", TINY), ("batching/mine", MINE)):
        file = folder / f"own/{name}.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    (folder / "here").mkdir()
    monkeypatch.chdir(folder / "here")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    prepare(tmp_path, monkeypatch)
    return tmp_path


def compare(folder: Path, *arguments: str, experiment: str = "tiny") -> int:
    own = ["--config-dir", str(folder / "own"), f"experiment={experiment}", "progress=false"]
    return main(["compare", *own, f"hydra.run.dir={folder}/out", *arguments])


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
    return evaluate(experiment, table_of(experiment, **values), interrupted=interrupted)


# What is shipped


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow) if path.stem in LARGE else path for path in SHIPPED],
    ids=lambda path: path.stem,
)
def test_every_shipped_experiment_composes_and_builds(path):
    cfg = ConfigSource(config_name="compare", dirs=[CONFIG_DIR]).compose([f"experiment={path.stem}"])
    settings, arms = build_settings(cfg), arms_of(cfg, [CONFIG_DIR])
    experiment = settings.experiment
    assert first_comment(path), "windtunnel list experiment shows it"
    assert len(arms) * len(experiment.seeds) == experiment.num_runs
    assert len(experiment.seeds) >= 5
    assert experiment.source
    assert experiment.expect
    assert settings_that_differ([p for p in arms if p.swept == experiment.swept[0]])


@pytest.mark.slow
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_what_every_shipped_experiment_expects_holds(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", f"experiment={path.stem}", f"hydra.run.dir={tmp_path}", "report=false"]) == 0
    judged = json.loads((tmp_path / "summary.json").read_text())["expectations"]
    assert [expectation["outcome"] for expectation in judged] == ["held"] * len(judged)


def on_trace(trace: Path) -> str:
    """Returns the setting that replays Mooncake's trace instead of traffic like it."""
    return f'also=["workload=mooncake_jsonl","workload.path={trace}","workload.window_by_seed=true"]'


@pytest.mark.parametrize("name", ["prefix_caches_on_mooncake", "routers_on_mooncake"])
def test_an_experiment_on_traffic_like_mooncakes_takes_the_trace_as_well(name, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 9, "output_length": 5, "hash_ids": [0]}\n')
    cfg = ConfigSource(config_name="compare", dirs=[CONFIG_DIR]).compose(
        [f"experiment={name}", on_trace(trace)]
    )
    for arm in arms_of(cfg, [CONFIG_DIR]):
        assert arm.config["workload"]["path"] == str(trace)
        assert arm.config["workload"]["duration_s"] == 600


def test_a_trace_that_is_missing_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["experiment=prefix_caches_on_mooncake", on_trace(Path("missing.jsonl"))]
    assert main(["compare", *arguments, f"hydra.run.dir={tmp_path}/out"]) == 2
    error = capsys.readouterr().err
    assert re.search(r"arm no_cache: .*path=missing.jsonl: no such file", error), error
    assert not (tmp_path / "out").exists()


def test_shell_completion_and_list_know_experiments(capsys):
    names = {name: command.config_name for name, command in cli.COMMANDS.items() if command.config_name}
    assert "experiment=gqa_mqa_mla" in candidates(["compare", "experiment="], list(cli.COMMANDS), names)
    assert candidates(["comp"], list(cli.COMMANDS), names) == ["compare", "completion"]
    assert main(["list", "experiment"]) == 0
    assert "prefill_decode_interference" in capsys.readouterr().out


def test_help_shows_the_experiments_own_settings(capsys):
    assert main(["compare", "--help", "experiment=gqa_mqa_mla"]) == 0
    page = capsys.readouterr().out
    assert "gqa_mqa_mla*" in page
    assert "experiment.baseline=mha" in page
    assert re.search(r"jobs=null +number of processes; null: one per core", page)


# A whole comparison


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """Returns the folder of a comparison of the user's own experiment: `out` and `printed.txt`."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as monkeypatch:
        prepare(folder, monkeypatch)
        with redirect_stdout(StringIO()) as printed:
            assert compare(folder, "jobs=1") == 0
    (folder / "printed.txt").write_text(printed.getvalue())
    return folder


def test_a_users_own_experiment_runs_from_end_to_end(finished):
    printed = (finished / "printed.txt").read_text()
    assert {file.name for file in (finished / "out").iterdir()} == {
        "config.yaml",
        "summary.json",
        "runs.parquet",
        "compare.html",
    }
    table = pd.read_parquet(finished / "out/runs.parquet")
    assert table[["seed", "arm"]].values.tolist() == [[s, arm] for s in (0, 1) for arm in ("chunked", "mine")]
    assert table["requests.finished"].tolist() == [30] * 4
    summary = json.loads((finished / "out/summary.json").read_text())
    assert summary["runs"] == {"done": 4, "asked": 4}
    ttft = next(c for c in summary["comparisons"] if c["arm"] == "mine" and c["metric"] == "ttft.mean_s")
    logs = [math.log(table["ttft.mean_s"][i + 1] / table["ttft.mean_s"][i]) for i in (0, 2)]  # seeds 0 and 1
    assert ttft["against_baseline"]["ratio"]["mean"] == pytest.approx(math.exp(sum(logs) / 2))
    assert summary["verdicts"][0].startswith("Expected: TTFT mean of mine at least ×1.001 that of chunked: ")
    assert all(sentence in printed for sentence in summary["verdicts"])
    assert "only 2 seeds" in printed


def test_a_run_of_an_arm_is_what_simulate_would_have_run(finished):
    row = pd.read_parquet(finished / "out/runs.parquet").iloc[3]
    base = OmegaConf.load(finished / "own/experiment/tiny.yaml").base
    cfg = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR, finished / "own"]).compose(
        [*base, "batching=mine", "seed=1"]
    )
    scenario, source = build_run(cfg)
    summary = figures(scenario.run(source).summary)
    assert (row["arm"], row["seed"]) == ("mine", 1)
    assert row["ttft.mean_s"] == summary["ttft.mean_s"]
    assert row["energy.joules"] == summary["energy.joules"]


def test_the_page_needs_no_network_and_shows_all_parts(finished):
    page = (finished / "out/compare.html").read_text()
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", page)
    for heading in (
        "Verdicts",
        "Figures",
        "Comparisons",
        "Settings that differ between the arms",
        "Configuration",
    ):
        assert f"<h2>{heading}</h2>" in page
    assert "<th>batching._target_</th>" in page, "the arms differ in their policy"
    assert "policies.batching.chunked.Chunked" in page.split("of a run of chunked")[1]


def test_processes_change_no_figure_and_no_order(folder):
    source = ConfigSource(config_name="compare", dirs=[CONFIG_DIR, folder / "own"])
    arms = arms_of(source.compose(["experiment=tiny"]), source.dirs)
    progress = []
    one, two = (runs.run_all(arms, (0, 1), jobs, lambda *done: progress.append(done)) for jobs in (1, 2))
    assert one.table.equals(two.table)
    assert one.notes == two.notes
    assert progress == [(1, 4), (2, 4), (3, 4), (4, 4)] * 2


def test_arms_that_are_the_same_are_equal_in_every_seed(folder):
    same = "experiment.arms.mine=[batching\\=chunked]"
    assert compare(folder, same, "jobs=1", "report=false") == 0
    verdicts_found = json.loads((folder / "out/summary.json").read_text())["verdicts"]
    assert "mine against chunked: TTFT mean is the same in every seed (2 paired seeds)" in verdicts_found


@pytest.mark.slow
def test_a_sweep_draws_a_line_an_arm_and_multirun_repeats_the_comparison(folder, capsys):
    sweep = "experiment.sweep={key: workload.arrivals.rate_per_s, values: [50, 400], label: requests/s}"
    many = ["--multirun", f"hydra.sweep.dir={folder}/sweep", "experiment.seeds=[0,1],[2,3]"]
    assert compare(folder, sweep, *many, "jobs=1", "report=false") == 0, capsys.readouterr().err
    for number, seeds in (("0", {0, 1}), ("1", {2, 3})):
        table = pd.read_parquet(folder / f"sweep/{number}/runs.parquet")
        assert set(table["seed"]) == seeds
        assert sorted(set(table["swept"])) == [50, 400]
        assert len(table) == 8
    assert "mine against chunked over requests/s: TTFT mean" in capsys.readouterr().out


def test_also_reaches_every_arm_and_an_arms_own_setting_wins(folder):
    also = 'also=["hardware=l40s","batching=static"]'
    assert compare(folder, also, "jobs=1", "report=false") == 0
    cfg = OmegaConf.load(folder / "out/config.yaml")
    settings, arms = build_settings(cfg), arms_of(cfg, [CONFIG_DIR, folder / "own"])
    assert settings.also == ("hardware=l40s", "batching=static")
    assert {point.config["hardware"]["name"] for point in arms} == {"L40S"}
    assert arms[0].config["batching"]["_target_"].endswith("Chunked")


def test_ctrl_c_keeps_the_runs_that_are_done_and_exits_130(folder, monkeypatch, capsys):
    arrive, begun = Gateway.arrive, []

    def interrupted(simulation, arrival):
        if arrival.request.request_id == 0:
            begun.append(simulation)
        if len(begun) == 4 and arrival.request.request_id == 10:
            signal.raise_signal(signal.SIGINT)
        arrive(simulation, arrival)

    monkeypatch.setattr(Gateway, "arrive", interrupted)
    assert compare(folder, "jobs=1", "experiment.seeds=[0,1,2]") == 130
    table = pd.read_parquet(folder / "out/runs.parquet")
    assert len(table) == 3, "the fourth was cut short"
    summary = json.loads((folder / "out/summary.json").read_text())
    assert summary["interrupted"]
    assert "Interrupted after 3 of 6 runs." in capsys.readouterr().out


def test_where_every_request_is_rejected_there_is_no_verdict(folder, capsys):
    small = 'experiment.arms.mine=["engine.num_kv_blocks=4"]'  # 64 tokens; every prompt has 512
    assert compare(folder, small, "jobs=1") == 0
    printed = capsys.readouterr().out
    assert "TTFT mean has no value in 2 of 2 runs of mine; these are left out." in printed
    assert "mine against chunked: no verdict on TTFT mean; no seed has a value in both arms" in printed
    assert "not decided (no ratio can be formed)" in printed


def die(config):
    os._exit(1)


def test_a_process_that_dies_is_named(folder, monkeypatch):
    source = ConfigSource(config_name="compare", dirs=[CONFIG_DIR, folder / "own"])
    arms = arms_of(source.compose(["experiment=tiny"]), source.dirs)
    monkeypatch.setattr(runs, "simulate_config", die)
    with pytest.raises(ConfigError, match=r"arm \w+, seed 0: its process ended abruptly"):
        runs.run_all(arms, (0, 1), 2, lambda *done: None)


def test_an_iteration_without_a_price_is_named(folder, monkeypatch):
    def unpriced(scenario, source, report):
        raise UnknownIterationError("no such iteration was recorded")

    source = ConfigSource(config_name="compare", dirs=[CONFIG_DIR, folder / "own"])
    arms = arms_of(source.compose(["experiment=tiny"]), source.dirs)
    monkeypatch.setattr(Scenario, "run", unpriced)
    with pytest.raises(ConfigError, match="arm chunked, seed 5: latency: no such iteration"):
        runs.run_all(arms, (5,), 1, lambda *done: None)


# What is refused, before anything runs


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
        (['experiment.arms.mine=["seed=3"]'], "arms.mine=seed: .* experiment.seeds sets the seeds"),
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
        (["experiment.sweep={key: workload.rate, values: [1]}"], "arm chunked: workload.rate: no such"),
        (["experiment.sweep={key: replicas, values: []}"], r"experiment.sweep.values=\[\]: must contain"),
        (["experiment.sweep={key: seed, values: [1]}"], "sweep.key=seed: must not be set here"),
        (
            ["experiment.sweep={key: replicas, values: [1, 0]}"],
            "arm chunked at replicas=0: replicas=0: must be >= 1",
        ),
        (["jobs=0"], "jobs=0: must be >= 1; null: one per core"),
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


# What is concluded


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
    assert sentence == "b beats a: preemptions −11.0 (95 % interval −13.5 to −8.52, 3 paired seeds)"


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
    return evaluate(experiment, pd.DataFrame(rows), interrupted=False)


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
        assert len(caveats(evaluate(experiment, by_seed, interrupted=False))) == 1 + said


def test_latencies_are_shown_in_milliseconds_and_shares_in_percent():
    metrics = (Metric(key="ttft.p99_s", better="lower"), Metric(key="kv.peak_use_share", better="lower"))
    experiment = make_experiment(metrics=metrics)
    table = table_of(experiment, a=[0.1] * 3, b=[0.2] * 3).assign(**{"kv.peak_use_share": 0.5})
    found = evaluate(experiment, table, interrupted=False)
    heading, *rows = metric_rows(found, metrics[0])
    assert heading == ["arm", "mean", "±", "over a", "95 % interval", "seeds", "verdict"]
    assert rows == [
        ["a", "100", "0", "", "", "3", ""],
        ["b", "200", "0", "×2.00", "2.00 to 2.00", "3", "worse"],
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


def test_interpolations_in_an_experiment_are_resolved(folder):
    source = ConfigSource(config_name="compare", dirs=[CONFIG_DIR, folder / "own"])
    settings = build_settings(source.compose(["experiment=tiny", "experiment.title=${experiment.baseline}"]))
    assert settings.experiment.title == "chunked"
