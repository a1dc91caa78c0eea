"""Shards of `windtunnel simulate`: workers die, disks are full, runs are continued; nothing counts twice."""

import errno
import json
import os
import random
import signal
import sys
import threading
import time
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from rich.console import Console

import experiments.simulate.shard_folder
import experiments.simulate.shard_task
import experiments.simulate.sharded_run
from experiments.app.job import CannotWriteError
from experiments.simulate.output import SimulateOutput
from experiments.simulate.shard_task import ShardTask
from experiments.simulate.sharded_output import run_sharded_streamed
from experiments.simulate.sharded_run import MAX_TRIES, ShardedRun
from experiments.simulate.streamed_output import run_streamed as run_streamed_here
from experiments.study.launchers.local import Local
from experiments.study.launchers.on_ray import OnRay
from experiments.study.launchers.outcome import Outcome, WorkerDiedError, attempt
from sim.report.files import run_files
from sim.settings.compose import ConfigSource
from sim.settings.config_groups import CONFIG_DIR
from sim.settings.errors import ConfigError
from sim.settings.resolve import resolved
from sim.settings.scenario import build_run

SETTINGS = (
    "model=smollm2_135m", "hardware=l4", "replicas=6", "workload=synthetic", "workload.num_requests=60",
    "load=4", "sim.shards=6",
)  # fmt: skip


@cache
def config():
    source = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
    return resolved(source.compose_plain(list(SETTINGS)))


TWO = Local(jobs=2)


def sharded(launcher=TWO, *, streams=False):
    scenario, source = build_run(config())
    return ShardedRun(
        scenario=scenario,
        config=config(),
        launcher=launcher,
        overrides=SETTINGS,
        config_dirs=(),
        num_requests=source.num_requests,
        progress=False,
        streams=streams,
    )


def content(result):
    """Returns the tables and the summary of a result, by name."""
    return dict(run_files(result, {}, tables=True))


@cache
def expected():
    """Returns the content of the same run in one process."""
    plain = config()
    scenario, source = build_run({**plain, "sim": {**plain["sim"], "shards": None}})
    return content(scenario.run(source))


QUIET = Console(file=open(os.devnull, "w"))  # noqa: SIM115 (open while the tests run)


def run(folder, launcher=TWO):
    result, shards = sharded(launcher).result(folder, QUIET)
    shards.remove()
    return content(result)


def files_of(folder):
    """Returns the results of a run that streams, by path."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def run_streamed(folder, launcher=TWO):
    output = SimulateOutput(tables="stream", report=False, progress=False)
    shards = sharded(launcher, streams=True)
    run_sharded_streamed(shards, output, config=config(), folder=folder, console=QUIET)
    return files_of(folder)


@cache
def expected_streamed():
    """Returns the results of the same run in one process that streams."""
    plain = config()
    one = {**plain, "sim": {**plain["sim"], "shards": None}}
    scenario, source = build_run(one)
    output = SimulateOutput(tables="stream", report=False, progress=False)
    with TemporaryDirectory() as folder:
        run_streamed_here(scenario, source, output, config=plain, folder=Path(folder), console=QUIET)
        return files_of(Path(folder))


RUNS = {"whole": (run, expected), "streamed": (run_streamed, expected_streamed)}


class Losing:
    """A launcher that loses a worker at its n-th tasks, in this process."""

    def __init__(self, *lost):
        self.lost, self.ran = set(lost), []

    def outcomes(self, work, tasks, interrupt):
        for index, task in enumerate(tasks):
            self.ran.append(task.index)
            if len(self.ran) in self.lost:
                yield Outcome(index, None, WorkerDiedError("its process was killed"))
            else:
                yield Outcome(index, *attempt(work, task))
            if interrupt.noted:
                return


def test_shards_in_processes_give_the_run(tmp_path):
    assert run(tmp_path) == expected()
    assert list(tmp_path.iterdir()) == []


def test_only_a_lost_shard_runs_again(tmp_path):
    launcher = Losing(2, 7)
    assert run(tmp_path, launcher) == expected()
    assert launcher.ran == [0, 1, 2, 3, 4, 5, 1, 1]


def test_a_shard_that_is_lost_again_and_again_ends_the_run_which_can_be_continued(tmp_path):
    launcher = Losing(*range(2, 2 + 6 * MAX_TRIES))
    with pytest.raises(ConfigError, match=r"5 shards of 6 lost 3 times.*to continue: windtunnel simulate"):
        run(tmp_path, launcher)
    launcher = Losing()
    assert run(tmp_path, launcher) == expected()
    assert launcher.ran == [1, 2, 3, 4, 5]


def test_a_full_disk_keeps_the_shards_before(tmp_path, monkeypatch):
    write, written = experiments.simulate.shard_folder.write_whole, []

    def write_some(file, data):
        written.append(file.name)
        if len(written) == 4:
            raise OSError(errno.ENOSPC, "No space left on device", str(file))
        write(file, data)

    monkeypatch.setattr(experiments.simulate.shard_folder, "write_whole", write_some)
    with pytest.raises(CannotWriteError, match=r"No space left.*2 of 6 shards are kept; make room, then"):
        run(tmp_path, Losing())
    launcher = Losing()
    assert run(tmp_path, launcher) == expected()
    assert launcher.ran == [2, 3, 4, 5]


def test_a_disk_without_room_is_refused_before_the_run(tmp_path, monkeypatch):
    free = SimpleNamespace(free=10_000)
    monkeypatch.setattr(experiments.simulate.sharded_run, "disk_usage", lambda folder: free)
    with pytest.raises(
        ConfigError, match=r"^hydra\.run\.dir=.*: 0\.0360 MB are needed for the shards of 60 requests"
    ):
        run(tmp_path)


def test_a_damaged_file_is_removed_and_simulated_again(tmp_path):
    with pytest.raises(ConfigError):
        run(tmp_path, Losing(*range(2, 30)))
    (tmp_path / "shards" / "0.zip").write_bytes(b"PK half a file")
    with pytest.raises(ConfigError, match=r"0\.zip: is damaged, and was removed"):
        run(tmp_path, Losing())
    launcher = Losing()
    assert run(tmp_path, launcher) == expected()
    assert launcher.ran == [0]


def test_shards_of_another_run_are_not_used(tmp_path, monkeypatch):
    with pytest.raises(ConfigError):
        run(tmp_path, Losing(*range(2, 30)))
    about = tmp_path / "shards" / "shards.json"
    found = json.loads(about.read_text())
    about.write_text(json.dumps(found | {"run": "another"}))
    with pytest.raises(ConfigError, match=r"holds shards of a run with other settings; .*overwrite=true"):
        run(tmp_path)
    about.write_text(json.dumps(found | {"code": "0.0.9"}))
    with pytest.raises(ConfigError, match=r"holds shards of a run with other code of windtunnel"):
        run(tmp_path)


def test_a_worker_with_other_code_is_an_error():
    task = ShardTask(index=0, num_shards=1, config="{}", import_dirs=(), code="0.0.9 (code 123)")
    with pytest.raises(ConfigError, match=r"has windtunnel .*, but this command has 0\.0\.9 \(code 123\)"):
        task.run()


def test_ctrl_c_keeps_the_finished_shards(tmp_path):
    class Interrupted(Losing):
        def outcomes(self, work, tasks, interrupt):
            for outcome in super().outcomes(work, tasks, interrupt):
                interrupt.noted = len(self.ran) == 3
                yield outcome

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, Interrupted())
    launcher = Losing()
    assert run(tmp_path, launcher) == expected()
    assert launcher.ran == [3, 4, 5]


def children_of(pid):
    """Returns the ids of the child processes of a process."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


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


@pytest.mark.skipif(sys.platform != "linux", reason="children are read from /proc")
@pytest.mark.parametrize("tables", sorted(RUNS))
@pytest.mark.parametrize("num_runs", [6, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_processes_change_no_result(tmp_path, tables, num_runs):
    RUNS[tables][1]()
    killed = [ends_as_expected(tmp_path / str(n), random.Random(n), tables) for n in range(num_runs)]
    assert sum(killed) > num_runs / 2


@pytest.mark.slow
@pytest.mark.parametrize("tables", sorted(RUNS))
def test_a_node_of_ray_that_is_gone_changes_no_result(tmp_path, tables):
    run_it, right = RUNS[tables]
    pytest.importorskip("ray", reason="needs the extra ray")
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    head = {"num_cpus": 1, "include_dashboard": False}
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    node = cluster.add_node(num_cpus=1)
    try:
        assert run_it(tmp_path / "two nodes", OnRay(address=cluster.address)) == right()
        gone = threading.Timer(4.0, lambda: cluster.remove_node(node, allow_graceful=False))
        gone.start()
        assert run_it(tmp_path / "one is gone", OnRay(address=cluster.address)) == right()
        gone.join()
    finally:
        cluster.shutdown()
