"""`windtunnel new policy`: the files that it writes work unchanged, and existing files are left alone."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.app import cli
from experiments.conformance.new_policy.command import FAMILIES, WITHOUT_TEMPLATE, class_name

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Changes to an empty folder; forgets afterwards what was imported from it."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def new(capsys, *arguments):
    """Runs `windtunnel new`; returns its exit code and what it printed."""
    code = cli.main(["new", *arguments])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def simulate_words(printed):
    """Returns the arguments of the printed `windtunnel simulate` line, for a short run."""
    (line,) = (line for line in printed.splitlines() if "windtunnel simulate" in line)
    small = ["sim.until_s=30", "output.report=false", "output.progress=false", "engine.num_kv_blocks=2000"]
    return [*line.split()[1:], *small]


@pytest.mark.sampled(fast=2, slow=7)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_simulates_as_printed_and_leaps_exactly(family, here, capsys):
    name = f"kit_{family}"
    code, printed = new(capsys, "policy", family, name)
    assert code == 0
    tables = []
    for leap in ("true", "false"):
        run = [*simulate_words(printed), f"sim.leap={leap}", f"hydra.run.dir={here / leap}"]
        assert cli.main(run) == 0, capsys.readouterr().err
        tables.append((here / leap / "requests.parquet").read_bytes())
    assert tables[0] == tables[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_hand_computed_schedule_passes_and_the_suite_is_in_the_test(family, pytester, capsys):
    new(capsys, "policy", family, "my_own")
    without = ("-p", "no:xdist", "-p", "no:cacheprovider", "-k", "not keeps_its_promises")
    assert pytester.runpytest_inprocess(*without, "test_my_own.py").parseoutcomes()["passed"] == 1
    assert "my_own_keeps_its_promises" in (pytester.path / "test_my_own.py").read_text()


@pytest.mark.sampled(slow=4)
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_written_test_passes(family, here, capsys):
    new(capsys, "policy", family, "my_own")
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:dash", "test_my_own.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout
    assert "warning" not in done.stdout


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_is_clean_and_has_nothing_left_of_the_template(family, here, capsys):
    new(capsys, "policy", family, "my_own")
    files = [here / "my_own.py", here / "test_my_own.py"]
    ruff = Path(sys.executable).with_name("ruff")
    subprocess.run([ruff, "check", "--isolated", "--line-length", "110", *files], check=True)
    config = here / "my_policies" / family / "my_own.yaml"
    for file in [*files, config]:
        text = file.read_text()
        assert not any(word in text for word in ("MyPolicy", "my_policy", "templates"))
    assert "_target_: my_own.MyOwn" in config.read_text()


@pytest.mark.parametrize(("has_dash", "quiet"), [(True, "-p no:dash "), (False, "")])
def test_says_what_to_run_next(here, capsys, monkeypatch, has_dash, quiet):
    """dash brings a pytest plugin that warns about itself."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: has_dash if name == "dash" else find(name))
    code, printed = new(capsys, "policy", "batching", "my_own", "--dir", "kit")
    assert code == 0
    assert printed.splitlines() == [
        "wrote kit/my_own.py",
        "wrote kit/my_policies/batching/my_own.yaml",
        "wrote kit/test_my_own.py",
        "next steps:",
        "  cd kit",
        "  windtunnel simulate --config-dir my_policies batching=my_own",
        "  pip install 'windtunnel[conformance]'  # for the tests",
        f"  pytest {quiet}test_my_own.py",
        f"  pytest {quiet}--policy my_own.MyOwn  # checks five times as many worlds",
    ]


@pytest.mark.parametrize("existing", ["my_own.py", "my_policies/batching/other.yaml", "test_my_own.py"])
def test_overwrites_nothing_and_then_writes_nothing(existing, here, capsys):
    file = here / existing
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("mine")
    before = sorted(here.rglob("*"))
    name = "other" if "other" in existing else "my_own"
    code, printed = new(capsys, "policy", "batching", name)
    assert code == 2
    assert "exists" in printed
    assert sorted(here.rglob("*")) == before
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["policy", "batching", "my-own"],
            "name=my-own: must consist of letters, digits and _, .*; nearest: my_own$",
        ),
        (["policy", "batching", "2fast"], "name=2fast: .*nearest: my_2fast$"),
        (["policy", "batching", "class"], "name=class: .*nearest: my_class$"),
        (
            ["policy", "batching", "chunked"],
            "name=chunked: batching=chunked already exists; choose another name",
        ),
        (
            ["policy", "routing", "queue"],
            "name=queue: there is already a Python module of that name; nearest: my_queue$",
        ),
        (["policy", "scheduling", "sim"], "name=sim: there is already a Python module of that name"),
        (["policy", "batchin", "x"], "batchin: no such family; nearest: batching; allowed: batching, "),
        (
            ["policy", "roles", "x"],
            "roles: has no template; start with a copy of policies/roles/balance.py and of a file in configs/"
            "roles; families with templates: batching, ",
        ),
        (
            ["policy", "retries", "x"],
            "retries: is a group of settings, not of policies; copy a file of configs/retries to my_",
        ),
        (["polcy", "batching", "x"], "new polcy: only a policy can be written"),
    ],
)
def test_rejects_what_cannot_be(arguments, message, here, capsys):
    code, printed = new(capsys, *arguments)
    assert code == 2
    assert re.search(message, printed.strip()), printed
    assert not list(here.iterdir())


@pytest.mark.parametrize(("group", "module"), WITHOUT_TEMPLATE.items())
def test_what_is_to_be_copied_where_there_is_no_template_is_there(group, module):
    assert (ROOT / module).is_file()
    assert list((ROOT / "configs" / group).glob("*.yaml"))


def test_a_folder_that_cannot_be_written_to_is_named(here, capsys):
    (here / "file").write_text("")
    code, printed = new(capsys, "policy", "batching", "my_own", "--dir", "file")
    assert code == 1
    assert "file" in printed
    assert "--dir" in printed


def test_class_names():
    assert [class_name(name) for name in ("my_policy", "fifo", "a_b2_c")] == ["MyPolicy", "Fifo", "AB2C"]


def test_the_command_is_listed(capsys):
    assert cli.main(["--help"]) == 0
    assert "  new " in capsys.readouterr().out


def test_a_policy_of_an_installed_package_serves_without_touching_the_project(here, capsys, monkeypatch):
    """A package on the path, as pip would put it there, and a config folder somewhere else."""
    new(capsys, "policy", "batching", "theirs")
    package = here / "site" / "their_package" / "serving"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    shutil.move(here / "theirs.py", package / "batching.py")
    config = here / "my_policies" / "batching" / "theirs.yaml"
    config.write_text(config.read_text().replace("theirs.Theirs", "their_package.serving.batching.Theirs"))
    monkeypatch.syspath_prepend(str(here / "site"))
    run = [
        "simulate",
        "--config-dir",
        "my_policies",
        "batching=theirs",
        "sim.until_s=10",
        "output.report=false",
    ]
    assert cli.main([*run, f"hydra.run.dir={here / 'out'}"]) == 0, capsys.readouterr().err
    assert "their_package.serving.batching.Theirs" in (here / "out" / "config.yaml").read_text()


def test_a_policy_in_a_plain_file_is_found_in_the_current_folder_and_nowhere_else(here, capsys, monkeypatch):
    new(capsys, "policy", "batching", "plain_one", "--dir", "there")
    run = ["simulate", "--config-dir", "there/my_policies", "batching=plain_one", "sim.until_s=10"]
    assert cli.main(run) == 2
    assert "install it, run in its folder, or add that folder to PYTHONPATH" in capsys.readouterr().err
    monkeypatch.chdir("there")
    run[2] = "my_policies"
    assert cli.main([*run, "output.report=false", f"hydra.run.dir={here / 'out'}"]) == 0, (
        capsys.readouterr().err
    )
