"""Every run has a folder of its own; files appear whole; an answer is printed before it is written."""

import errno
import json
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from experiments.app.cli import main
from experiments.app.run_folder import LOCK, claim, lock_folder
from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from sim.report.files import write_whole, written_whole
from sim.settings.errors import ConfigError

SIMULATE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
LIMIT_S = 600
"""Longest time that a command may take; it takes about 3 s where nothing else runs."""
SMALL = ("model=smollm2_135m", "hardware=l4", "workload.num_requests=5", "output.report=false")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def config(*overrides):
    return SIMULATE.compose([f"hydra.run.dir={'out'}", *overrides] if overrides else [], with_hydra=True)


def started(*words, **settings):
    """Starts `windtunnel simulate` as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.app.cli", "simulate", *SMALL, *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **settings,
    )


def test_runs_of_one_second_have_folders_of_their_own():
    cfgs = [config() for _ in range(6)]
    for cfg in cfgs:
        cfg.hydra.run._set_flag("readonly", False)
    clock = str(cfgs[0].hydra.run.dir)
    found = []

    def take(cfg):
        claimed = claim(cfg, "run.dir", overwrite=False)
        assert cfg.hydra.run.dir == str(claimed)
        found.append(claimed)

    threads = [threading.Thread(target=take, args=[cfg]) for cfg in cfgs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 6
    assert all(folder.is_dir() for folder in found)
    assert any(str(folder) == clock for folder in found)


def test_three_commands_started_together_keep_three_results():
    running = [started(f"seed={seed}") for seed in (1, 2, 3)]
    for process in running:
        _, error = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, error) == (0, "")
    seeds = [
        line
        for file in Path("outputs").rglob("config.yaml")
        for line in file.read_text().splitlines()
        if line.startswith("seed:")
    ]
    assert sorted(seeds) == ["seed: 1", "seed: 2", "seed: 3"]
    assert len(list(Path("outputs").rglob("summary.json"))) == 3


def test_a_folder_with_results_is_not_written_into_unless_asked():
    Path("out").mkdir()
    assert claim(config("seed=1"), "run.dir", overwrite=False) == Path("out")  # an empty one will do
    for name in ("summary.json", "requests.parquet", "notes.txt", "data.json"):
        Path("out", name).write_text("{}")
    with pytest.raises(
        ConfigError, match=r"^hydra\.run\.dir=out: is not empty; choose another folder, or add ov"
    ):
        claim(config("seed=1"), "run.dir", overwrite=False)
    claim(config("seed=1"), "run.dir", overwrite=True)
    assert sorted(os.listdir("out")) == ["data.json", "notes.txt"]  # what windtunnel does not write stays


def test_overwrite_is_true_or_false():
    process = started("overwrite=yes")
    _, error = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, error) == (2, "windtunnel: overwrite=yes: must be true or false\n")


def test_a_run_into_an_earlier_folder_leaves_the_earlier_result():
    for words, code in (([], 0), (["seed=2"], 2), (["seed=2", "overwrite=true"], 0)):
        assert main(["simulate", *SMALL, "hydra.run.dir=out", *words]) == code
        line = next(line for line in Path("out/config.yaml").read_text().splitlines() if "seed:" in line)
        assert line == ("seed: 2" if words[1:] else "seed: 0")


def test_the_lock_names_its_holder_and_ends_with_it(tmp_path):
    held = lock_folder(tmp_path)
    with pytest.raises(ConfigError, match=rf"process {os.getpid()} on .* since .* works on it; wait until"):
        lock_folder(tmp_path)
    held.close()
    lock_folder(tmp_path).close()
    assert (tmp_path / LOCK).read_text().startswith(f"process {os.getpid()} on ")


def test_a_file_is_the_old_one_or_the_whole_new_one(tmp_path, monkeypatch):
    file = tmp_path / "a.json"
    write_whole(file, "old")
    for broken in ("write_bytes", "open"):

        def fail(self, *given, **named):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(Path, broken, fail)
            with pytest.raises(OSError, match="No space left") as error:
                write_whole(file, "new")
        assert error.value.filename == str(file)
        assert file.read_text() == "old"
        assert os.listdir(tmp_path) == ["a.json"]

    def interrupted():
        with written_whole(file) as part:
            part.write_text("ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (file.read_text(), os.listdir(tmp_path)) == ("old", ["a.json"])
    write_whole(file, "new")
    assert file.read_text() == "new"


def test_a_quota_ends_the_command_with_one_sentence_behind_its_answer():
    process = started(
        "hydra.run.dir=out", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    )
    printed, error = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "TTFT" in printed
    assert error.count("\n") == 1
    assert "File too large; make room or choose another hydra.run.dir" in error
    assert not [name for name in os.listdir("out") if name.endswith(".part")]
    assert not Path("out/summary.json").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_ends_the_command_with_one_sentence():
    Path("out").mkdir(mode=0o500)
    process = started("hydra.run.dir=out/run")
    _, error = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "Permission denied" in error


def test_a_whole_run_is_readable():
    process = started("hydra.run.dir=out")
    process.communicate(timeout=LIMIT_S)
    assert json.loads(Path("out/summary.json").read_text())["requests"]


def test_overwrite_removes_tables_that_are_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = Path("out", "requests.parquet")
    table.mkdir(parents=True)
    (table / "part-000000.parquet").write_bytes(b"")
    claim(config("seed=1"), "run.dir", overwrite=True)
    assert not table.exists()
