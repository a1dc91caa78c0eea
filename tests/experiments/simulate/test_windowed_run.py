"""Windows of `windtunnel simulate` in processes: the tables of one process, and a process that dies."""

import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from experiments.app.cli import main
from experiments.app.runner import run_command
from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.app.settings.resolve import resolved
from experiments.simulate import command, windowed_run
from experiments.simulate.part_process import PartElsewhere
from experiments.simulate.windowed_run import WindowedRun
from experiments.study import progress
from experiments.study.launchers.importing import ROOT
from experiments.study.launchers.local import Local
from sim.report.files import run_files
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run
from sim.shards.request_windows import WindowWriter

SETTINGS = (
    "model=smollm2_135m", "hardware=l4", "replicas=4", "routing=join_shortest_kv", "routing.ties=index",
    "workload=synthetic", "workload.num_requests=60", "load=4",
)  # fmt: skip


NUM_KILLED = 5


@cache
def config(shards):
    source = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
    return resolved(source.compose_plain([*SETTINGS, f"sim.shards={shards}"]))


def windowed(launcher=Local(jobs=2)):  # noqa: B008  (a frozen setting)
    scenario, source = build_run(config(3))
    return WindowedRun(scenario=scenario, source=source, config=config(3), launcher=launcher)


def test_processes_write_what_one_process_writes(tmp_path):
    scenario, source = build_run(config("null"))
    whole = scenario.run(source)
    divided, kept = windowed().result(tmp_path, None)
    assert kept is None
    assert dict(run_files(divided, {}, tables=True)) == dict(run_files(whole, {}, tables=True))


LOST = (
    r"sim\.shards=3: the process of replicas? .* was killed \(SIGKILL\), perhaps for lack of memory; parts "
    r"of a run with signals cannot go on without each other, and nothing is kept; begin the run again, "
)


def test_a_run_that_loses_a_process_ends_with_a_sentence(monkeypatch):
    begun = []

    class Killed(PartElsewhere):
        def begin(self, replicas, until_s):
            begun.append(until_s)
            if len(begun) == 5:
                os.kill(self._process.pid, signal.SIGKILL)
            super().begin(replicas, until_s)

    monkeypatch.setattr(windowed_run, "PartElsewhere", Killed)
    with pytest.raises(ConfigError, match=LOST + "with output.tables=stream if memory was short$"):
        windowed().records(None)


def test_other_launchers_are_refused():
    settings = [*SETTINGS, "sim.shards=2", "launcher=submitit", "launcher.cluster=local"]
    with pytest.raises(ConfigError, match="choose launcher=local"):
        run_command(
            ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]),
            settings,
            command.__name__,
            multirun=False,
        )


def simulate(folder, *arguments):
    """Returns the exit code of a run without a page."""
    common = (*SETTINGS, f"hydra.run.dir={folder}", "output.report=false")
    return main(["simulate", *common, *arguments])


def test_files_of_a_run_that_streams_are_those_of_one_process(tmp_path):
    one, divided = tmp_path / "one", tmp_path / "divided"
    assert simulate(one, "output.tables=stream") == 0
    assert simulate(divided, "output.tables=stream", "sim.shards=3") == 0
    assert {file.name for file in divided.iterdir()} == {file.name for file in one.iterdir()}
    assert (one / "summary.json").read_bytes() == (divided / "summary.json").read_bytes()
    parts = sorted(file.name for file in (one / "requests.parquet").iterdir())
    assert parts == sorted(file.name for file in (divided / "requests.parquet").iterdir())
    for name in parts:
        both = [(folder / "requests.parquet" / name).read_bytes() for folder in (one, divided)]
        assert both[0] == both[1]
    assert (one / "series.parquet").read_bytes() == (divided / "series.parquet").read_bytes()
    both = [pd.read_parquet(folder / "replicas.parquet") for folder in (one, divided)]
    pd.testing.assert_frame_equal(*both, rtol=1e-12)


def test_rows_that_cannot_be_written_end_the_run_with_a_sentence(tmp_path, monkeypatch, capsys):
    def full(self, rows):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(WindowWriter, "add", full)  # in the processes, too, as they are forked
    assert simulate(tmp_path / "run", "output.tables=stream", "sim.shards=3") == 1
    assert "parquet: No space left on device; make room or choose another" in capsys.readouterr().err
    assert not (tmp_path / "run" / "windows").exists()


def test_the_progress_of_all_parts_is_shown(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    records = replace(windowed(), progress=True).records(Console(file=StringIO()))
    last = capsys.readouterr().err.splitlines()[-1]
    assert len(records.requests) == 60
    assert re.fullmatch(r"60 of 60 requests, [\d.]+/s, 0:00:00 left", last)


def children_of(pid):
    """Returns the ids of the child processes of a process."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


COMMAND = [sys.executable, "-m", "experiments.app.cli", "simulate", *SETTINGS, "output.report=false"]
LONG = ("workload.num_requests=40000", "sim.shards=3", "launcher.jobs=3")


def begun(folder, *arguments):
    """Starts a long run; returns it and its processes, once all have started."""
    command = subprocess.Popen(
        [*COMMAND, *LONG, f"hydra.run.dir={folder}", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    while len(parts := children_of(command.pid)) < 2:  # the third part runs in the command itself
        assert command.poll() is None
        time.sleep(0.01)
    return command, parts


def assert_gone(pids, within_s):
    end_s = time.monotonic() + within_s
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end_s, "a process has stayed"
        time.sleep(0.01)


def test_ctrl_c_ends_all_processes_within_seconds(tmp_path):
    command, parts = begun(tmp_path, "output.tables=stream")
    time.sleep(0.3)
    begin_s = time.monotonic()
    command.send_signal(signal.SIGINT)
    _, errors = command.communicate(timeout=20)
    assert time.monotonic() - begin_s < 5
    assert (command.returncode, errors.splitlines()[-1]) == (130, "windtunnel: interrupted")
    assert_gone(parts, 5)
    assert not (tmp_path / "windows").exists()


@pytest.mark.slow
def test_no_process_and_no_lock_stays_whatever_is_killed(tmp_path):
    """A part or the command itself is killed at random moments; then the same command runs."""
    draw = random.Random(5)
    for index in range(NUM_KILLED):
        command, parts = begun(tmp_path / str(index), "output.tables=stream")
        time.sleep(draw.uniform(0, 0.5))
        kills_part = draw.random() < 0.6
        os.kill(draw.choice(parts) if kills_part else command.pid, signal.SIGKILL)
        _, errors = command.communicate(timeout=20)
        assert_gone(parts, 5)
        if kills_part:
            assert command.returncode == 2
            assert re.search(LOST, errors)
        again = simulate(tmp_path / str(index), "output.tables=stream", "sim.shards=3", "overwrite=true")
        assert again == 0
        assert not (tmp_path / str(index) / "windows").exists()


WAITING = """
import sys
import time
from experiments.simulate.part_process import PartElsewhere, PartTask

parts = [PartElsewhere(PartTask(config=sys.argv[1], bounds=bounds)) for bounds in ((0, 2), (2, 4))]
print("begun", flush=True)
time.sleep(60)
"""


def test_parts_end_when_their_command_is_killed():
    command = subprocess.Popen(
        [sys.executable, "-c", WAITING, json.dumps(config(2))], stdout=subprocess.PIPE, cwd=ROOT
    )
    assert command.stdout.readline() == b"begun\n"
    command.kill()
    command.communicate(timeout=20)  # its output ends with the last of the processes that have it open
