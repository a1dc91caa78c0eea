"""From settings to runs: composed once, prepared before anything runs, Hydra's habits kept."""

import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from experiments.app.application import _open_page, launch
from experiments.app.job import CannotWriteError, UnsuccessfulError
from experiments.app.run_folder import file_errors_reported
from experiments.app.settings.compose import ConfigSource
from sim.settings.errors import ConfigError

WET, WRONG_WIND = "trip.days=15", "trip.days=12"


def recorded(what):
    """Returns a list that the toy application keeps: RUNS, FOLDERS, SEEN or PREPARED."""
    return getattr(sys.modules["toy_application"], what)


@pytest.fixture
def composed(monkeypatch):
    """Returns a list that grows by the overrides of each composition."""
    found, compose = [], ConfigSource._composed

    def noted(self, overrides):
        found.append(overrides)
        return compose(self, overrides)

    monkeypatch.setattr(ConfigSource, "_composed", noted)
    return found


def test_a_run_is_composed_once(toy, composed):
    launch(toy, ["seed=7", "wheel=steel", "hydra.run.dir=elsewhere"])
    assert recorded("RUNS") == [(7, 16)]
    assert recorded("FOLDERS") == ["elsewhere"]
    assert recorded("PREPARED") == [["seed=7", "wheel=steel"]]
    assert len(composed) == 1


def test_a_multirun_runs_every_combination_in_its_numbered_folder(toy, composed):
    launch(toy, ["seed=1,2", "--multirun", "wheel=wooden,steel"])  # the flag between them, too
    assert recorded("RUNS") == [(1, 4), (1, 16), (2, 4), (2, 16)]
    assert recorded("FOLDERS") == ["out/0", "out/1", "out/2", "out/3"]
    assert OmegaConf.load("out/multirun.yaml").hydra.overrides.task == ["seed=1,2", "wheel=wooden,steel"]
    assert len(composed) == 5  # the multirun as a whole, and each point


@pytest.mark.parametrize(
    ("words", "folders"),
    [
        (["seed=1,2", "hydra.sweep.subdir=${hydra.job.override_dirname}"], ["out/seed=1", "out/seed=2"]),
        (["seed=1,2", "hydra.sweep.dir=${hydra.job.name}"], ["toy/0", "toy/1"]),
        (["wheel=glob(s*)"], ["out/0"]),
    ],
)
def test_folders_of_a_multirun_are_those_of_hydra(toy, words, folders):
    launch(toy, ["--multirun", *words])
    assert recorded("FOLDERS") == folders


def test_values_to_sweep_may_be_a_choice_of_the_users(toy):
    (toy.config_dir / "fleet").mkdir()
    (toy.config_dir / "fleet/two.yaml").write_text(
        "# @package _global_\nhydra: {sweeper: {params: {seed: '3,4'}}}\n"
    )
    launch(toy, ["-m", "+fleet=two"])
    assert [seed for seed, _ in recorded("RUNS")] == [3, 4]
    launch(toy, ["-m", "+fleet=two", "seed=range(1,3)", "overwrite=true"])  # the command line wins
    assert [seed for seed, _ in recorded("RUNS")][2:] == [1, 2]


def test_the_time_of_day_is_that_of_the_folder_in_every_run(toy):
    now = "${now:%H-%M-%S-%f}"
    launch(toy, ["-m", "seed=1,2", f"hydra.sweep.dir='{now}'", f"sail.area_m2='{now}'"])
    assert [[folder[:-2]] * 2 for folder in recorded("FOLDERS")] == [
        [folder[:-2], note]
        for folder, (_, note, _) in zip(recorded("FOLDERS"), recorded("SEEN"), strict=True)
    ]


def test_hydras_node_and_environment_are_there_for_the_run(toy):
    words = [
        "sail.area_m2='${hydra:runtime.output_dir}'",
        "+hydra.job.env_set.SAIL=red",
        "hydra.run.dir=here",
    ]
    launch(toy, words)
    assert recorded("SEEN") == [("toy", str(Path("here").absolute()), "red")]


def test_hydra_leaves_no_folder_and_no_log_of_its_own(toy):
    launch(toy, [])
    assert [path for path in Path().rglob("*") if path.is_file()] == []


def test_a_point_that_fails_on_the_way_is_named_when_the_others_are_done(toy, capsys):
    with pytest.raises(ConfigError, match=r"^the wind is wrong \(at seed=1 trip\.days=12\)$"):
        launch(toy, ["-m", "seed=1,2", f"{WRONG_WIND},3"])
    assert recorded("RUNS") == [(1, 4)] * 2 + [(2, 4)] * 2
    assert capsys.readouterr().err == ""


def test_points_without_success_are_reported_when_all_are_done(toy):
    with pytest.raises(UnsuccessfulError, match=r"^seed 1 was wet; seed 2 was wet$"):
        launch(toy, ["-m", "seed=1,2", WET])
    assert [seed for seed, _ in recorded("RUNS")] == [1, 2]


@pytest.mark.parametrize(
    ("days", "error"), [(13, RuntimeError), (14, KeyboardInterrupt)], ids=["bug", "ctrl-c"]
)
def test_a_bug_and_ctrl_c_end_a_multirun(toy, days, error):
    with pytest.raises(error):
        launch(toy, ["-m", "seed=1,2", f"trip.days={days}"])
    assert recorded("RUNS") == [(1, 4)]


def test_only_errors_about_the_run_folder_advise_another_one(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(CannotWriteError, match="choose another hydra"), file_errors_reported(folder):
        (folder / "summary.json").write_text("")
    with pytest.raises(FileNotFoundError), file_errors_reported(folder):
        (tmp_path / "weights_of_a_policy.json").read_text()


def test_hydras_launchers_prepare_each_run_where_it_runs(toy, composed):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    words = ["-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=1", "seed=1,2"]
    launch(toy, words)
    assert recorded("RUNS") == [(1, 4), (2, 4)]
    assert recorded("FOLDERS") == ["out/0", "out/1"]
    with pytest.raises(ConfigError, match=r"wheel\.spokes=1: must be at least 3 \(at wheel\.spokes=1\)"):
        launch(toy, [*words[:-1], "wheel.spokes=4,1"])
    assert len(recorded("RUNS")) == 2


def test_callbacks_of_hydra_are_called(toy):
    launch(toy, ["+hydra.callbacks.mine._target_=toy_log.Log"])
    assert sys.modules["toy_log"].CALLED == ["on_run_start", "on_job_start", "on_job_end", "on_run_end"]
    assert recorded("RUNS") == [(0, 4)]


def test_cfg_prints_the_composed_config(toy, capsys):
    launch(toy, ["--cfg", "job", "wheel=steel"])
    assert "spokes: 16" in capsys.readouterr().out
    launch(toy, ["--cfg", "all", "--resolve", "seed=5"])
    assert "dir: out/5" in capsys.readouterr().out
    assert "toy_application" not in sys.modules


def test_info_says_where_choices_come_from(toy, capsys, tmp_path):
    (tmp_path / "work/mine").mkdir()
    launch(toy, ["--info", "searchpath", "--config-dir", "mine"])
    assert f"windtunnel://{tmp_path}/work/mine" in capsys.readouterr().out


def test_open_shows_the_page_of_the_run(toy, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda page: bool(opened.append(page)) or len(opened) < 2)
    launch(toy, ["--open", "hydra.run.dir=run", "overwrite=true"])
    assert "the run has written no page" in capsys.readouterr().err
    Path("run/report.html").touch()
    launch(toy, ["--open", "hydra.run.dir=kept", "seed=1"])
    for folder in ("run", "kept"):
        Path(folder, "report.html").touch()
        _open_page(Path(folder))
    assert opened == [Path(folder, "report.html").absolute().as_uri() for folder in ("run", "kept")]
    assert "no browser was found" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["-m", "--open"], ["-m", "--cfg", "job"], ["--info", "all", "--cfg", "job"], ["--resolve"]]
)
def test_flags_that_exclude_each_other_are_refused(toy, words):
    with pytest.raises(ConfigError, match="leave"):
        launch(toy, words)
