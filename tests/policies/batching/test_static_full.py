"""Static batches that wait until they are full, and the last one, which is not."""

from __future__ import annotations

from math import inf

import pytest

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from policies.batching.static import Dynamic, Static
from policies.core.plan import StepOutcome
from policies.user_code import WrongDecisionError
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_scenario

A, B, C = range(3)


def full(batch_size=2):
    return Static(batch_size=batch_size, waits_until_full=True)


def test_a_batch_starts_once_it_is_full(make_core, make_request):
    core = make_core(batching=full())
    core.add(make_request(A))
    assert core.plan(0.0) is None
    assert core.wake_s == inf
    core.add(make_request(B))
    assert core.plan(1.0).tokens_by_request == {A: 4, B: 4}


def test_the_last_batch_runs_when_no_more_requests_come(make_core, make_request):
    core = make_core(batching=full())
    core.add(make_request(A), stop_after=1)
    assert core.plan(0.0) is None
    assert core.end_traffic()
    plan = core.plan(0.0)
    assert plan.tokens_by_request == {A: 4}
    core.commit(plan, StepOutcome(), 0.1)
    core.add(make_request(B))
    assert core.plan(0.2) is None, "a new request begins to wait anew"


def test_an_engine_without_requests_that_wait_is_not_told(make_core, make_request):
    core = make_core(batching=full())
    assert not core.end_traffic()
    core.add(make_request(A))
    core.add(make_request(B))
    core.plan(0.0)
    assert not core.end_traffic()


def run(*overrides):
    words = [
        "model=smollm2_135m",
        "workload.num_requests=10",
        "batching=static",
        "batching.batch_size=4",
        "batching.waits_until_full=true",
        *overrides,
    ]
    return (
        build_scenario(ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]).compose(words))
        .run()
        .in_pandas()
    )


@pytest.mark.parametrize("leap", ["true", "false"])
def test_ten_requests_are_three_batches_and_none_is_lost(leap):
    """Requests come one a second; a batch starts with its fourth, and the rest at the last arrival."""
    result = run(
        "workload=synthetic",
        "workload/arrivals=constant",
        "workload.arrivals.rate_per_s=1",
        f"sim.leap={leap}",
    )
    table = result.records.requests
    assert table["status"].eq("finished").all()
    started = table["scheduled_s"].round(1).tolist()
    assert len(set(started)) == 3
    assert [started.count(value) for value in sorted(set(started))] == [4, 4, 2]
    arrivals = table["arrival_s"].tolist()
    assert sorted(set(started))[:2] == pytest.approx([arrivals[3], arrivals[7]], abs=0.2)


def test_users_of_a_closed_loop_that_are_fewer_than_a_batch_are_served():
    result = run("workload=closed_loop", "workload/arrivals=max_concurrency", "workload.arrivals.num_users=3")
    assert result.records.requests["status"].eq("finished").all()


@pytest.mark.parametrize(
    ("overrides", "driver"),
    [
        (("scaling=utilisation",), "a run that is scaled"),
        (("sim.stop_overloaded=true",), "sim.stop_overloaded"),
    ],
)
def test_rejects_runs_that_never_come_to_rest(overrides, driver):
    message = f"(?=.*waits_until_full=true).*{driver}.*does not know when no more requests come"
    with pytest.raises(ConfigError, match=message):
        run("workload=poisson", *overrides)


def test_rejects_a_wait_beside_a_limited_one():
    with pytest.raises(ValueError, match="waits_until_full=true: must be false, as max_queue_delay_s limits"):
        Dynamic(waits_until_full=True)


def test_a_policy_that_waits_for_ever_is_refused(make_core, make_request):
    class Never:
        max_num_batched_tokens = 16

        def fill(self, view, step, now):
            step.wait_until(inf)

    core = make_core(batching=Never())
    core.add(make_request(A))
    assert core.plan(0.0) is None
    assert core.end_traffic()
    assert core.plan(0.0) is None
    with pytest.raises(WrongDecisionError, match="waits for ever"):
        core.end_traffic()
