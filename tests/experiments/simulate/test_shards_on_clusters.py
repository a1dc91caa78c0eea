"""Runs in shards on a Ray cluster and in jobs of submitit, of which a part is lost."""

import os
import signal
import threading
import time
from contextlib import nullcontext

import pytest

import experiments.simulate.sharded_run
from experiments.study.launchers import on_ray
from experiments.study.launchers.by_submitit import BySubmitit
from experiments.study.launchers.on_ray import OnRay
from sim.settings.errors import ConfigError
from tests.experiments.simulate.runs_in_shards import RUNS, children_of, run


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


@pytest.mark.slow
def test_workers_of_ray_with_other_code_are_named_before_they_simulate(tmp_path, monkeypatch):
    pytest.importorskip("ray", reason="needs the extra ray")
    with monkeypatch.context() as other:
        other.setattr(experiments.simulate.sharded_run, "code_of_windtunnel", lambda: "0.0.9 (code 123)")
        with pytest.raises(ConfigError, match=r"^launcher: the worker on .* this command has 0\.0\.9"):
            run(tmp_path / "other", OnRay(jobs=1))
    (tmp_path / "none" / "experiments").mkdir(parents=True)
    (tmp_path / "none" / "experiments" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)  # Ray's workers import from the folder in which the command runs
    monkeypatch.setattr(on_ray, "python_path", lambda: str(tmp_path / "none"))
    monkeypatch.setattr(on_ray, "passed_on", nullcontext)
    with pytest.raises(ConfigError, match=r"^launcher=ray: a worker cannot import .*No module named"):
        run(tmp_path / "results", OnRay(jobs=1))


def descendants_of(pid):
    """Returns the ids of the processes that a process has started, and of those that these have started."""
    own = children_of(pid)
    return own + [each for child in own for each in descendants_of(child)]


@pytest.mark.slow
@pytest.mark.parametrize("tables", sorted(RUNS))
def test_a_killed_job_of_submitit_changes_no_result(tmp_path, tables):
    pytest.importorskip("submitit", reason="needs the extra submitit")
    run_it, right = RUNS[tables]
    launcher = BySubmitit(jobs=2, folder=str(tmp_path / "jobs"))
    assert run_it(tmp_path / "all", launcher) == right()
    killed = []

    def kill_a_job():
        while not list(tmp_path.glob("jobs/*/results/*.begun")):
            time.sleep(0.02)
        killed.append(descendants_of(os.getpid())[-1])
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_a_job, daemon=True)
    killer.start()
    assert run_it(tmp_path / "one is killed", launcher) == right()
    killer.join(timeout=1)
    assert killed
    assert not (tmp_path / "jobs").exists()
