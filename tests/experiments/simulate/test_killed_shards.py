"""Runs in shards of which processes are killed at random moments: nothing is lost or counts twice."""

import os
import random
import signal
import sys
import time

import pytest

from sim.settings.errors import ConfigError
from tests.drawn import drawn_of
from tests.experiments.simulate.runs_in_shards import RUNS, children_of


def begin(folder, tables):
    """Starts the run in a process of its own, which exits with 0 once its result is right."""
    run_it, right = RUNS[tables]
    pid = os.fork()
    if pid:
        return pid
    try:
        code = 0 if run_it(folder) == right() else 9
    except ConfigError:
        code = 2
    except BaseException:
        code = 8
    os._exit(code)


def ends_as_expected(folder, draw, tables):
    """Runs until there is a result, while workers and the command itself are killed at random moments.

    Returns the number of processes that were killed.
    """
    num_kills, num_killed = draw.randrange(1, 5), 0
    for _ in range(20):
        command = begin(folder, tables)
        ended, status = 0, 0
        while not ended and num_killed < num_kills:
            time.sleep(draw.expovariate(1 / 0.06))
            ended, status = os.waitpid(command, os.WNOHANG)
            victims = [command] if draw.random() < 0.3 else children_of(command)
            if victims and not ended:
                os.kill(draw.choice(victims), signal.SIGKILL)
                num_killed += 1
        if not ended:
            _, status = os.waitpid(command, 0)
        code = os.waitstatus_to_exitcode(status)
        assert code in (0, 2, -signal.SIGKILL)  # 2: a shard was lost three times
        if code == 0:
            return num_killed
        time.sleep(0.6)  # until the workers of a killed command have noticed
    raise AssertionError("the run does not end")


@pytest.mark.sampled(fast=1, slow=2)
@pytest.mark.skipif(sys.platform != "linux", reason="children are read from /proc")
@pytest.mark.parametrize("tables", sorted(RUNS))
@pytest.mark.parametrize("num_runs", [2, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_processes_change_no_result(tmp_path, tables, num_runs):
    RUNS[tables][1]()
    seeds = drawn_of(range(num_runs), 30, f"killed {tables}")
    killed = [ends_as_expected(tmp_path / str(n), random.Random(n), tables) for n in seeds]
    assert sum(killed) > len(seeds) / 2
