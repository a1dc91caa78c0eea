"""Launchers: every task has one outcome, and the failure of one does not touch the others."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.study.launchers.by_submitit import BySubmitit
from experiments.study.launchers.importing import ROOT, passed_on, python_path
from experiments.study.launchers.local import Local
from experiments.study.launchers.on_ray import OnRay
from experiments.study.launchers.outcome import WorkerDiedError
from experiments.study.workers import in_turn
from sim.engine.clock import Interrupt
from sim.settings.errors import ConfigError


@dataclass(frozen=True)
class Number:
    n: int

    @property
    def name(self):
        return f"number {self.n}"


def square(task):
    return task.n * task.n


def odd_work(task):
    """Fails in four ways: task 3 is killed, 5 raises, 7 raises an unpicklable error, 9 a ConfigError."""
    if task.n == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if task.n == 5:
        raise ValueError("five")
    if task.n == 7:
        raise _Unpicklable(lambda: 0, "seven")
    if task.n == 9:
        raise ConfigError("nine: must not be")
    return task.n


class _Unpicklable(Exception):
    pass


def outcomes_of(launcher, work, count, interrupt=None):
    tasks = [Number(n) for n in range(count)]
    return {o.index: o for o in launcher.outcomes(work, tasks, interrupt or Interrupt())}


def assert_each_task_has_its_own_fate(found, count):
    assert sorted(found) == list(range(count))
    assert all(found[n].result == n and found[n].error is None for n in found if n not in (3, 5, 7, 9))
    assert isinstance(found[3].error, WorkerDiedError)
    assert isinstance(found[5].error, ValueError)
    assert "five" in "".join(found[5].error.__notes__)
    assert "seven" in str(found[7].error)
    assert str(found[9].error) == "nine: must not be"


@settings(max_examples=12)
@given(count=st.integers(0, 9), jobs=st.integers(1, 4))
def test_every_task_has_one_outcome(count, jobs):
    found = outcomes_of(Local(jobs=jobs), square, count)
    assert {index: o.result for index, o in found.items()} == {n: n * n for n in range(count)}


@pytest.mark.parametrize("jobs", [2, 3])
def test_a_killed_worker_costs_its_own_task(jobs):
    found = outcomes_of(Local(jobs=jobs), odd_work, 14)
    assert_each_task_has_its_own_fate(found, 14)
    assert str(found[3].error).startswith("its process was killed (SIGKILL), perhaps for lack of memory")


def leaving_work(task):
    """Ends its process: task 1 by sys.exit, task 2 by os._exit."""
    if task.n == 1:
        sys.exit(4)
    if task.n == 2:
        os._exit(5)
    return task.n


@pytest.mark.parametrize(("jobs", "count"), [(1, 2), (2, 4)])
def test_a_run_that_exits_ends_itself_alone(jobs, count):
    found = outcomes_of(Local(jobs=jobs), leaving_work, count)
    assert sorted(found) == list(range(count))
    assert str(found[1].error) == "the run called sys.exit(4)"
    assert "leaving_work" in "".join(found[1].error.__notes__)
    if jobs > 1:
        assert str(found[2].error) == "its process ended abruptly (exit code 5)"
        assert found[3].result == 3


def test_no_process_is_left_when_the_reader_goes_away():
    outcomes = Local(jobs=2).outcomes(square, [Number(n) for n in range(50)], Interrupt())
    next(outcomes)
    assert multiprocessing.active_children()
    outcomes.close()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("jobs", [1, 2])
def test_nothing_begins_after_ctrl_c(jobs):
    interrupt, seen = Interrupt(), []
    for outcome in Local(jobs=jobs).outcomes(square, [Number(n) for n in range(50)], interrupt):
        seen.append(outcome.index)
        interrupt.noted = True
    assert 1 <= len(seen) <= jobs + 1


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_task_may_depend_on_the_results_of_earlier_ones(jobs):
    known = []

    def tasks():
        yield from (Number(2), Number(3))
        while len(known) < 2:
            yield None  # there is none until these have ended
        yield Number(sum(known))

    for outcome in Local(jobs=jobs).outcomes(square, tasks(), Interrupt()):
        known.append(outcome.result)
    assert sorted(known[:2]) == [4, 9]
    assert known[2:] == [169]


def cut_short(task):
    raise KeyboardInterrupt


@pytest.mark.parametrize("jobs", [1, 2])
def test_work_that_ctrl_c_cut_short_has_no_outcome(jobs):
    interrupt = Interrupt()
    assert outcomes_of(Local(jobs=jobs), cut_short, 5, interrupt) == {}
    assert interrupt.noted


def test_commands_that_need_every_run_name_the_one_that_was_lost():
    with pytest.raises(ConfigError, match=r"^number 3: its process was killed \(SIGKILL\)"):
        list(in_turn(odd_work, [Number(3)] * 2, 2, Interrupt()))
    with pytest.raises(ConfigError, match=r"^number 9: nine: must not be"):
        list(in_turn(odd_work, [Number(9)], 1, Interrupt()))
    with pytest.raises(ValueError, match="five"):
        list(in_turn(odd_work, [Number(5)] * 2, 2, Interrupt()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Local(jobs=0), "jobs=0: must be >= 1"),
        (lambda: OnRay(jobs=0), "jobs=0: must be >= 1"),
        (lambda: OnRay(address="somewhere"), "address=somewhere: must be HOST:PORT"),
        (lambda: OnRay(address="here:99999"), "address=here:99999: must be HOST:PORT"),
        (lambda: OnRay(connect_s=0.0), "connect_s=0.0: must be > 0"),
        (lambda: BySubmitit(cluster="pbs"), "cluster=pbs: must be one of local, slurm"),
        (lambda: BySubmitit(runs_per_job=0), "runs_per_job=0: must be > 0"),
    ],
)
def test_launchers_refuse_what_they_cannot_do(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("launcher", "package"), [(OnRay(), "ray"), (BySubmitit(), "submitit")], ids=["ray", "submitit"]
)
def test_a_launcher_says_which_extra_it_needs(launcher, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"^launcher={package}: .*pip install 'windtunnel\[{package}\]'"):
        outcomes_of(launcher, square, 1)


def test_a_dead_ray_address_is_reported_within_seconds(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", object())  # never asked: it would try for minutes
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    begun = time.monotonic()
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
        with pytest.raises(ConfigError, match=rf"^launcher.address={address}: no Ray cluster responds there"):
            outcomes_of(OnRay(address=address), square, 1)
    assert time.monotonic() - begun < 60


def test_slurm_is_missed_before_anything_is_submitted(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    launcher = BySubmitit(cluster="slurm", folder=str(tmp_path / "jobs"))
    with pytest.raises(ConfigError, match=r"^launcher\.cluster=slurm: .*srun"):
        outcomes_of(launcher, square, 1)


def test_other_processes_import_the_same_files(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere/else")
    assert python_path().split(os.pathsep)[:2] == [ROOT, "/somewhere/else"]
    with passed_on():
        assert os.environ["PYTHONPATH"].startswith(ROOT)
    assert os.environ["PYTHONPATH"] == "/somewhere/else"
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    with passed_on():
        assert os.environ["PYTHONSAFEPATH"] == "1"
        assert os.environ["PYTHONPATH"].startswith(ROOT)
    assert not {"PYTHONPATH", "PYTHONSAFEPATH"} & os.environ.keys()


@pytest.fixture
def importable_here(monkeypatch):
    """Makes this file importable by a process that pytest did not start."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    module = __import__("test_launchers")
    return module


@pytest.mark.slow
def test_submitit_jobs_keep_what_they_did_before_one_was_killed(tmp_path, importable_here):
    pytest.importorskip("submitit")
    there = importable_here
    launcher = BySubmitit(jobs=2, runs_per_job=6, folder=str(tmp_path / "jobs"))
    tasks = [there.Number(n) for n in range(14)]
    found = {o.index: o for o in launcher.outcomes(there.odd_work, tasks, Interrupt())}
    assert_each_task_has_its_own_fate(found, 14)
    assert "see its log" in str(found[3].error)
    assert not (tmp_path / "jobs").exists()


@pytest.mark.slow
def test_a_ray_cluster_of_two_nodes_runs_everything(importable_here):
    pytest.importorskip("ray", reason="needs the extra ray")
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    there = importable_here
    with passed_on():
        cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        try:
            cluster.add_node(num_cpus=1)
            tasks = [there.Number(n) for n in range(14)]
            launcher = OnRay(address=cluster.address)
            found = {o.index: o for o in launcher.outcomes(there.odd_work, tasks, Interrupt())}
        finally:
            cluster.shutdown()
    assert_each_task_has_its_own_fate(found, 14)


@pytest.mark.slow
def test_without_an_address_ray_starts_here(importable_here):
    pytest.importorskip("ray", reason="needs the extra ray")
    there = importable_here
    tasks = [there.Number(n) for n in range(4)]
    found = {o.index: o.result for o in OnRay(jobs=2).outcomes(there.square, tasks, Interrupt())}
    assert found == {n: n * n for n in range(4)}


RESULTS_TOO_LARGE_FOR_A_PIPE = """
import time
from experiments.study.launchers.local import Local
from sim.engine.clock import Interrupt

for _ in Local(jobs=2).outcomes(bytes, [1 << 20] * 9, Interrupt()):
    print("begun", flush=True)
    time.sleep(60)
"""


def test_workers_end_when_their_command_is_killed():
    command = subprocess.Popen(
        [sys.executable, "-c", RESULTS_TOO_LARGE_FOR_A_PIPE], stdout=subprocess.PIPE, cwd=ROOT
    )
    assert command.stdout.readline() == b"begun\n"
    command.kill()
    command.communicate(timeout=20)  # its output ends with the last of the processes that have it open
