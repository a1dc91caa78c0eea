"""Tests that a long run keeps nothing of requests that have ended, whatever the setup."""

import gc
import sys
from subprocess import run

import pytest

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from policies.core.sequence import Sequence
from sim.cluster.chunked import ChunkedRecording
from sim.cluster.simulation import Simulation
from sim.settings.scenario import build_run
from sim.transfer.network import Flow


def counts_of_objects():
    return [sum(type(each) is kind for each in gc.get_objects()) for kind in (Sequence, Flow)]


class Watched(ChunkedRecording):
    """The recording of a streamed run; it counts, before the end, the objects that the process holds."""

    counts = None

    def end(self, run, end_s, *, interrupted):
        self.counts = counts_of_objects()
        return super().end(run, end_s, interrupted=interrupted)


@pytest.mark.sampled(fast=1, slow=2)
@pytest.mark.parametrize(
    "overrides",
    [
        ["pools=disaggregated"],
        ["replicas=3", "failures=crash", "failures.events.0.at_s=5", "recovery=kv"],
        ["replicas=3", "retries.timeout_s=2", "retries.max_attempts=2"],
    ],
    ids=["disaggregated", "crash", "retries"],
)
def test_ended_requests_are_forgotten(overrides):
    usual = ["workload=poisson", "workload.num_requests=400", "workload.arrivals.rate_per_s=20"]
    source = ConfigSource(config_name="scenario", dirs=(CONFIG_DIR,))
    scenario, traffic = build_run(source.compose(usual + overrides))
    gc.collect()
    watched = Watched(lambda chunk: None, group_rows=64)
    run = Simulation(
        source=traffic,
        pools=scenario.replica_pools(),
        cluster=scenario.for_a_run(),
        recording=watched,
    )
    before = counts_of_objects()  # other tests of this process may hold some
    run.run()
    grown = [count - earlier for count, earlier in zip(watched.counts, before, strict=True)]
    assert all(count < 200 for count in grown), grown


PROGRAM = """
import sys
from experiments.bench.memory import peak_mib
from sim.cluster.chunked import ChunkedRecording
from sim.cluster.simulation import Simulation
from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from sim.settings.scenario import build_run
num_requests, num_replicas = int(sys.argv[1]), int(sys.argv[2])
rate = f"workload.arrivals.rate_per_s={8 * num_replicas}"
settings = ["workload=poisson", f"workload.num_requests={num_requests}", f"replicas={num_replicas}", rate]
settings.append("engine.num_kv_blocks=4000")
source = ConfigSource(config_name="scenario", dirs=(CONFIG_DIR,))
scenario, traffic = build_run(source.compose(settings))
Simulation(
    source=traffic,
    pools=scenario.replica_pools(),
    cluster=scenario.for_a_run(),
    recording=ChunkedRecording(lambda chunk: None),
).run()
print(peak_mib())
"""


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [40, 1000])
def test_memory_does_not_grow_with_the_number_of_requests(num_replicas):
    """Even the shorter run fills the prefix cache of every replica, which keeps blocks of ended requests."""
    peaks = []
    for num_requests in (100_000, 300_000):
        arguments = [sys.executable, "-c", PROGRAM, str(num_requests), str(num_replicas)]
        done = run(arguments, capture_output=True, text=True, check=True)
        peaks.append(float(done.stdout))
    assert peaks[1] < 1.1 * peaks[0]
    assert peaks[1] < 700
