"""A plain run imports only what it uses, as the imports of other features would take longer than it."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from experiments.app.cli import OWN_PACKAGES

RUN = """
import gc, json, sys
from experiments.app import cli
sys.argv[1:1] = ["simulate", "workload=poisson", "workload.num_requests=5", "output.report=false"]
code = cli.main()
print(json.dumps([code, gc.isenabled(), gc.get_freeze_count(), list(sys.modules)]))
"""

OF_OTHER_RUNS = (
    # runs in parts, on other processes and machines
    "sim.shards",
    "experiments.study",
    "experiments.simulate.sharded_run",
    "experiments.simulate.shard_task",
    "multiprocessing.connection",
    "ray",
    "submitit",
    "joblib",
    # runs that stream their tables
    "sim.cluster.chunked",
    "sim.metrics.sketches",
    "sim.metrics.plots",
    "sim.setup.streaming",
    "sim.report.chunk_tables",
    "pyarrow.dataset",
    # thinned fleets
    "sim.metrics.thinned",
    "sim.setup.thinning",
    "sim.workload.thinned",
    # pages and files that are not written
    "sim.report.page",
    "sim.report.perfetto",
    "sim.report.vllm_bench",
    "plotly",
    # policies and levels that are not chosen
    "hwmodels.levels.afd",
    "policies.batching.prefill_delayer",
    "scipy",
    "torch",
    # frames of tables, for which the run is not asked
    "pandas",
)


@pytest.fixture(scope="module")
def after_a_run(tmp_path_factory):
    """Returns exit code, whether garbage is collected, frozen objects, and modules after a plain run."""
    folder = f"hydra.run.dir={tmp_path_factory.mktemp('plain')}"
    command = [sys.executable, "-c", RUN, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_a_plain_run_imports_nothing_of_other_runs(after_a_run):
    code, *_, modules = after_a_run
    assert code == 0
    assert "sim.cluster.simulation" in modules
    imported = [name for name in modules if any(f"{name}.".startswith(f"{own}.") for own in OF_OTHER_RUNS)]
    assert imported == []


def test_modules_of_other_runs_exist_by_these_names():
    ours = [name for name in OF_OTHER_RUNS if name.partition(".")[0] in OWN_PACKAGES]
    assert ours
    assert [name for name in ours if find_spec(name) is None] == []


def test_garbage_is_collected_after_the_start(after_a_run):
    _, is_enabled, num_frozen, _ = after_a_run
    assert is_enabled
    assert num_frozen > 100_000
