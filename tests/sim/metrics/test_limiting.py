"""Where the requests' time goes: shares sum to one, and the scarce resource is found."""

import pytest

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from sim.metrics.limiting import time_shares
from sim.settings.scenario import build_run, run

SOURCE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
LARGE = ("workload=poisson", "workload.num_requests=60", "caching=paged")


def shares_of(*overrides):
    return time_shares(run(*build_run(SOURCE.compose([*LARGE, *overrides]))))


@pytest.mark.parametrize(
    ("overrides", "scarce"),
    [
        (["workload.arrivals.rate_per_s=0.5"], "memory bandwidth"),  # one decode at a time reads all weights
        (["workload.arrivals.rate_per_s=50", "engine.max_num_seqs=2"], "sequence slots"),
        (["workload.arrivals.rate_per_s=50", "engine.num_kv_blocks=100"], "KV memory"),
        (["prompt_scale=30", "output_scale=0.004", "workload.arrivals.rate_per_s=0.2"], "compute"),
        (["model=smollm2_135m", "engine.host.iteration_s=0.1"], "host"),
    ],
)
def test_what_is_scarce_takes_the_time(overrides, scarce):
    shares = shares_of(*overrides)
    assert next(iter(shares)) == scarce
    assert sum(shares.values()) == pytest.approx(1)
    assert list(shares.values()) == sorted(shares.values(), reverse=True)


def test_waiting_is_counted_as_it_was_recorded():
    result = run(
        *build_run(SOURCE.compose([*LARGE, "workload.arrivals.rate_per_s=50", "engine.max_num_seqs=2"]))
    )
    e2e_s = result.requests["e2e_s"].sum()
    assert time_shares(result)["sequence slots"] == pytest.approx(
        result.requests["wait_slot_s"].sum() / e2e_s
    )


def test_nothing_measured_has_no_limit():
    result = run(*build_run(SOURCE.compose([*LARGE, "sim.until_s=1e-9"])))
    assert time_shares(result) == {}
