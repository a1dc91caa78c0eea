"""Replicas that no request reaches change nothing, except what they cost."""

import pytest

import sim.setup.scenario as scenario_module
from experiments.app.api import simulate
from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.study.figures import figures
from sim.settings.scenario import build_run
from sim.setup.pool import num_reached
from tests.tables import assert_equal_tables

SMALL = ("model=smollm2_135m", "hardware=l4", "workload=poisson", "workload.num_requests=7")


@pytest.mark.parametrize(
    "more",
    [(), ("workload=conversation", "workload.num_conversations=4"), ("workload.arrivals.rate_per_s=1",)],
)
def test_a_fleet_with_idle_replicas_is_simulated_as_if_all_had_engines(more, monkeypatch):
    words = [word for word in SMALL if "conversation" not in "".join(more) or "workload" not in word]
    short = simulate(*words, *more, "replicas=40")
    monkeypatch.setattr(scenario_module, "num_reached", lambda *settings: 40)
    whole = simulate(*words, *more, "replicas=40")
    assert figures(short.summary) == pytest.approx(figures(whole.summary), nan_ok=True)
    assert_equal_tables(short.requests, whole.requests)
    assert_equal_tables(short.replicas, whole.replicas)
    assert_equal_tables(short.iterations, whole.iterations)


def test_a_hundred_thousand_replicas_with_a_few_requests_have_a_result():
    found = simulate(*SMALL, "replicas=100000")
    assert len(found.replicas) == 100_000
    assert found.summary["requests"]["finished"] == 7


@pytest.mark.parametrize("more", ["routing=random", "routing=least_outstanding", "retries=immediate"])
def test_what_may_reach_any_replica_is_simulated_with_all(more):
    cfg = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]).compose([*SMALL, more, "replicas=40"])
    scenario, source = build_run(cfg)
    assert num_reached(scenario, scenario.pools_by_name, scenario.sim, source) == 40
