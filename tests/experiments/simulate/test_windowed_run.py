"""Windows of `windtunnel simulate` in processes: the tables of one process, and a process that dies."""

import json
import os
import signal
import subprocess
import sys
from functools import cache

import pytest

from experiments.app.runner import run_command
from experiments.simulate import command, windowed_run
from experiments.simulate.windowed_run import PartElsewhere, WindowedRun
from experiments.study.launchers.importing import ROOT
from experiments.study.launchers.local import Local
from sim.report.files import run_files
from sim.settings.compose import ConfigSource
from sim.settings.config_groups import CONFIG_DIR
from sim.settings.errors import ConfigError
from sim.settings.resolve import resolved
from sim.settings.scenario import build_run

SETTINGS = (
    "model=smollm2_135m", "hardware=l4", "replicas=4", "routing=join_shortest_kv", "routing.ties=index",
    "workload=synthetic", "workload.num_requests=60", "load=4",
)  # fmt: skip


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


def test_a_run_that_loses_a_process_ends_with_a_sentence(monkeypatch):
    begun = []

    class Killed(PartElsewhere):
        def begin(self, replicas, until_s):
            begun.append(until_s)
            if len(begun) == 5:
                os.kill(self._process.pid, signal.SIGKILL)
            super().begin(replicas, until_s)

    monkeypatch.setattr(windowed_run, "PartElsewhere", Killed)
    with pytest.raises(ConfigError, match=r"a process of the run ended abruptly .*; nothing is kept"):
        windowed().records()


def test_other_launchers_are_refused():
    settings = [*SETTINGS, "sim.shards=2", "launcher=submitit", "launcher.cluster=local"]
    with pytest.raises(ConfigError, match="choose launcher=local"):
        run_command(
            ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]),
            settings,
            command.__name__,
            multirun=False,
        )


WAITING = """
import sys
import time
from experiments.simulate.windowed_run import PartElsewhere

parts = [PartElsewhere(sys.argv[1], bounds) for bounds in ((0, 2), (2, 4))]
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
