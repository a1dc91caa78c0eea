"""The console script: its messages and exit codes, and the modules that it imports for them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.app import cli
from experiments.app.application import launch
from experiments.app.settings.config_groups import find_groups, first_comment, key_comments
from sim.settings.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]


def runs():
    """Returns (seed, spokes) of every run so far; an empty list if the application was not imported."""
    return getattr(sys.modules.get("toy_application"), "RUNS", [])


WHEELS = "custom, steel, wooden"
ROOT_NAMES = "sail, sail/cloth, seed, trip, wheel"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["wheel=steal"], f"wheel=steal: no such choice; nearest: steel; allowed: {WHEELS}"),
        (["wheel=5"], f"wheel=5: no such choice; allowed: {WHEELS}"),
        (["--cfg", "job", "wheel=5"], f"wheel=5: no such choice; allowed: {WHEELS}"),
        (["whel=steel"], f"whel: no such group or setting; nearest: wheel; allowed: {ROOT_NAMES}"),
        (["+whel=steel"], f"whel: no such group or setting; nearest: wheel; allowed: {ROOT_NAMES}"),
        (["+trip.dais=4"], "trip.dais: no such setting; nearest: trip.days; allowed: trip.days, trip.fast"),
        (
            ["sail/cloht=silk"],
            f"sail/cloht: no such group or setting; nearest: sail/cloth; allowed: {ROOT_NAMES}",
        ),
        (["sail/cloth=slik"], "sail/cloth=slik: no such choice; nearest: silk; allowed: linen, silk"),
        (["sail=none", "sail/cloth=silk"], "sail/cloth=silk: is not used by sail=none"),
        (["trip.dais=4"], "trip.dais: no such setting; nearest: trip.days; allowed: trip.days, trip.fast"),
        (["days=4"], f"days: no such group or setting; nearest: trip.days; allowed: {ROOT_NAMES}"),
        (["trap.days=4"], f"trap.days: no such group or setting; nearest: trip.days; allowed: {ROOT_NAMES}"),
        (["wheel.spoks=4"], "wheel.spoks: no such setting; nearest: wheel.spokes; allowed: wheel.spokes"),
        (["+wheel.spoks=4"], "wheel.spoks: no such setting; nearest: wheel.spokes; allowed: wheel.spokes"),
        (["wheel.spokes=abc"], "wheel.spokes=abc: must be an integer"),
        (["wheel.spokes=2"], "wheel.spokes=2: must be at least 3"),
        (["wheel=custom"], "wheel.spokes: must be given, for example wheel.spokes=1"),
        (
            ["wheel._target_=toy_classes.Weel"],
            "wheel._target_=toy_classes.Weel: module toy_classes has no Weel; nearest: Wheel; allowed: Wheel",
        ),
        (["~trip.dais"], "trip.dais: no such setting; nearest: trip.days; allowed: trip.days, trip.fast"),
        (["hydra.run.dirr=x"], "hydra.run.dirr: no such setting of Hydra"),
        (
            ["seed=range(0,5)x"],
            "seed=range(0,5)x: cannot be read as key=value; remove x at the end: 'seed=range(0,5)'",
        ),
        (["seed=[1"], "seed=[1: cannot be read as key=value; add what is missing at the end: 'seed=[1]'"),
        (
            ["seed=range(0,5"],
            "seed=range(0,5: cannot be read as key=value; add what is missing at the end: 'seed=range(0,5)'",
        ),
        (["seed=a=b"], "seed=a=b: cannot be read as key=value; quote special characters: 'seed=\"a=b\"'"),
        (
            ["seed=[a=b]"],
            "seed=[a=b]: cannot be read as key=value; write each text of the list in quotes: "
            "\"seed=['a=b']\"",
        ),
        (["wheel=steel", "wheel=custom"], "wheel=custom: wheel is chosen twice; leave out wheel=steel"),
        (["sed"], "sed: must be key=value; nearest: seed=..."),
        (["seed=1,2"], "seed=1,2: several values need --multirun (a list is written [a,b])"),
        (
            ["trip.days.hours=4"],
            f"trip.days.hours: no such group or setting; nearest: trip.days; allowed: {ROOT_NAMES}",
        ),
        (
            ["--multirun", "wheel=wooden,steal"],
            f"wheel=steal: no such choice; nearest: steel; allowed: {WHEELS} (at wheel=steal)",
        ),
        (
            ["-m", "seed=1,2", "wheel.spokes=5,1"],
            "wheel.spokes=1: must be at least 3 (at seed=1 wheel.spokes=1)",
        ),
        (["--config-dir", "nowhere"], "--config-dir=nowhere: no such folder"),
    ],
)
def test_wrong_setting_is_one_clear_message_and_nothing_runs(toy, arguments, message):
    with pytest.raises(ConfigError) as error:
        launch(toy, arguments)
    assert str(error.value) == message
    assert runs() == []
    assert not Path("out").exists()


def test_a_launcher_of_hydra_that_is_not_there_is_reported_with_those_that_are(toy):
    with pytest.raises(ConfigError, match=r"^hydra/launcher=nosuch: no such choice; allowed: basic"):
        launch(toy, ["hydra/launcher=nosuch"])  # more where plugins are installed


def test_reports_file_and_line_of_a_yaml_mistake(toy, tmp_path):
    (tmp_path / "work/mine/wheel").mkdir(parents=True)
    (tmp_path / "work/mine/wheel/bent.yaml").write_text("_target_: toy_classes.Wheel\nspokes: [4\n")
    with pytest.raises(ConfigError, match=r"bent\.yaml:3:1: not valid YAML"):
        launch(toy, ["--config-dir", "mine", "wheel=bent"])


def test_users_own_choice_and_class_need_only_a_folder(toy, tmp_path):
    (tmp_path / "work/mine/wheel").mkdir(parents=True)
    (tmp_path / "work/mine/wheel/fancy.yaml").write_text("_target_: my_toy_wheel.Fancy\n")
    (tmp_path / "work/my_toy_wheel.py").write_text("class Fancy:\n    spokes = 99\n")
    launch(toy, ["wheel=fancy", "--config-dir", "mine"])
    assert runs() == [(0, 99)]


def test_help_shows_groups_settings_and_comments(toy, capsys):
    launch(toy, ["--help", "wheel=steel"])
    page = capsys.readouterr().out
    assert "custom steel* wooden" in page
    assert "seed=0" in page
    assert "of every random draw" in page
    assert "wheel.spokes=16" in page
    assert "sail.cloth.grams=200" in page
    assert "hydra" not in page
    assert "toy_application" not in sys.modules


def test_main_returns_2_and_prints_one_line_for_a_config_error(capsys):
    assert cli.main(["simulte"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "windtunnel: simulte: no such command; nearest: simulate; all: windtunnel --help\n"
    assert err.count("\n") == 1


def test_main_returns_130_on_ctrl_c(toy, monkeypatch, capsys):
    monkeypatch.setattr("experiments.app.application.launch", lambda app, words: launch(toy, words))
    assert cli.main(["simulate", "trip.days=14"]) == 130
    assert capsys.readouterr().err == "windtunnel: interrupted\n"


def test_main_returns_3_and_says_why_for_a_result_that_is_no_success(toy, monkeypatch, capsys):
    monkeypatch.setattr("experiments.app.application.launch", lambda app, words: launch(toy, words))
    assert cli.main(["simulate", "trip.days=15"]) == 3
    assert capsys.readouterr().err == "windtunnel: seed 0 was wet\n"


def test_overview_names_every_command(capsys):
    assert cli.main(["--help"]) == 0
    page = capsys.readouterr().out
    assert all(f"  {name} " in page for name in cli.COMMANDS)
    assert cli.main([]) == 0
    page = capsys.readouterr().out
    assert all((f"  {name} " in page) == (name in cli.EVERYDAY) for name in cli.COMMANDS)
    assert "more: windtunnel --help" in page


def test_list_shows_first_comments(toy, capsys, monkeypatch):
    monkeypatch.setattr("experiments.app.list_choices.config_dirs", lambda user_dir: [toy.config_dir])
    assert cli.main(["list", "wheel"]) == 0
    out = capsys.readouterr().out
    assert "wooden" in out
    assert "Four spokes." in out
    assert "linen" not in out
    assert cli.main(["list", "wheels"]) == 2
    assert "nearest: wheel" in capsys.readouterr().err


def test_groups_leave_out_hydras_own(toy):
    groups = find_groups([toy.config_dir])
    assert list(groups) == ["sail", "sail/cloth", "wheel"]
    assert [choice.name for choice in groups["wheel"]] == ["custom", "steel", "wooden"]


def test_first_comment_skips_directives(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("# @package _global_\n#\n# What it is.\n# More.\nx: 1\n")
    assert first_comment(file) == "What it is."
    file.write_text("x: 1\n# too late\n")
    assert first_comment(file) == ""


def test_key_comments_follow_the_nesting(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("a:\n  b: 1  # one\n  c:\n    d: x#y  # two\ne: 'f'\n")
    assert key_comments(file) == {"a": "", "a.b": "one", "a.c": "", "a.c.d": "two", "e": ""}
    assert key_comments(file, prefix="p")["p.a.b"] == "one"


def test_names_the_package_that_shadows_ours(tmp_path, monkeypatch):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    with pytest.raises(
        ConfigError, match=rf"package kernels comes from {tmp_path}/kernels, not from {ROOT}/kernels: "
    ):
        cli.check_not_shadowed(ROOT)


def test_ours_are_not_shadowed_here(tmp_path):
    """And a folder without them is refused, so the check does look."""
    cli.check_not_shadowed(ROOT)
    with pytest.raises(ConfigError, match=f"comes from {ROOT}/{cli.OWN_PACKAGES[0]}, not from {tmp_path}/"):
        cli.check_not_shadowed(tmp_path)


def test_overview_imports_nothing_heavy():
    assert _modules_after(["--help"]).isdisjoint({"hydra", "omegaconf", "numpy", "pandas", "rich"})


def test_list_imports_nothing_heavy():
    assert _modules_after(["list"]).isdisjoint({"hydra", "omegaconf", "numpy", "pandas", "torch"})


def _modules_after(arguments):
    """Returns the top-level modules that a fresh interpreter has imported after the command."""
    code = (
        f"import json, sys; from experiments.app import cli; cli.main({arguments!r});"
        "print(json.dumps(list(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in json.loads(done.stderr)}
