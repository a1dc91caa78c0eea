"""Counts that no run can have are refused at once, with the limit and the reason; whole floats are counts."""

import pytest

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run

SOURCE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
POISSON, LOOP = "workload=poisson", "workload=closed_loop"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["replicas=1e12"],
            "^replicas=1000000000000: must be >= 1 and <= 1,000,000, as each is an engine in memory",
        ),
        (["replicas=1e30"], r"^replicas=1e\+30: must be an integer of 64 bits, at most 9.22e\+18"),
        (
            [POISSON, "workload.num_requests=1e12"],
            r"num_requests=1e\+12: must be <= 1,000,000,000; more would",
        ),
        ([POISSON, "workload.num_requests=1e30"], r"num_requests=1e\+30: must be an integer of 64 bits"),
        ([POISSON, "workload.duration_s=1e300"], r"duration_s=1e\+300: must be <= 1,000,000,000 s"),
        (
            [POISSON, "workload.num_requests=null", "workload.duration_s=1e9"],
            "must have at most 1,000,000,000 requests, the product of both",
        ),
        ([LOOP, "workload.arrivals.num_users=1e12"], r"num_users=1e\+12: must be <= 10,000,000; each user"),
        (["workload=conversation", "workload.num_conversations=1e12"], r"must be <= 100,000,000"),
        (["seed=1e30"], r"^seed=1e\+30: must be an integer of 64 bits"),
        ([POISSON, "workload.arrivals.rate_per_s=inf"], "must be finite and > 0"),
        (["tensor_parallel_size=1000000000"], "must divide the 32 attention heads"),
        (
            ["engine.max_num_seqs=1e15"],
            "engine.max_num_seqs=1000000000000000: must be >= 1 and <= 1,000,000, as each slot is in memory",
        ),
    ],
)
def test_absurd_counts_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        build_run(SOURCE.compose(overrides))


def test_whole_floats_are_counts():
    scenario, source = build_run(SOURCE.compose([POISSON, "workload.num_requests=1e3", "replicas=2e0"]))
    assert (scenario.replicas, source.num_requests) == (2, 1000)
