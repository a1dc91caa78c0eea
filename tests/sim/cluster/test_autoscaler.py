"""Replicas that come and go: cold starts, drains and costs, worked out by hand in ticks."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.conformance.toys import ToyModel
from hwmodels.iterations import IterationModel
from policies.admission import AdmitAll
from policies.routing.load_balancing import LeastOutstanding
from policies.scaling.reactive import Utilisation
from policies.scaling.scheduled import Scheduled
from sim.cluster.failures import Failures, Scripted
from sim.metrics.figure import PoolHardware
from sim.metrics.summary import summarise
from sim.records.run import FailureKind
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_scenario
from tests.worlds.clusters import WorldPool, draw_clusters

TICK_S = 0.125


def by_the_clock(*replicas, interval):
    """Returns a schedule with these numbers of replicas from tick 0, 16 and 32 of a day of 48 ticks.

    interval: ticks between two looks at the schedule.
    """
    entries = [
        {"at": at, "replicas": num} for at, num in zip(("00:00", "08:00", "16:00"), replicas, strict=True)
    ]
    return Scheduled(interval_s=interval * TICK_S, entries=tuple(entries), day_s=48 * TICK_S, min_replicas=0)


@pytest.fixture(params=[True, False], ids=["leap", "step"])
def run_world(request, make_world):
    def run_world(*asks, **settings):
        return make_world(*asks, routing=LeastOutstanding(), **settings).simulate(request.param).records

    return run_world


def spans(records):
    return [(replica.start_s / TICK_S, replica.end_s / TICK_S) for replica in records.replicas]


def test_a_replica_serves_after_its_cold_start_and_leaves_when_its_last_request_has_ended(run_world, ask):
    """Ordered at 16, there at 21; from 32 on it gets no more, at 42 it is gone."""
    pool = WorldPool(scaling=by_the_clock(1, 2, 1, interval=4), cold_start_s=5 * TICK_S)
    records = run_world(
        *(ask(tick * TICK_S, 4, num) for tick, num in [(0, 60), (20, 20), (22, 20), (33, 5), (34, 5)]),
        pools=(pool,),
    )
    assert records.requests.replica.tolist() == [0, 0, 1, 0, 0]
    assert records.requests.status.eq("finished").all()
    assert records.requests.finished_s.tolist() == [tick * TICK_S for tick in (60, 40, 42, 38, 39)]
    assert spans(records) == [(0, 60), (16, 42)]


def test_a_replica_that_is_not_needed_any_more_never_starts(run_world, ask):
    """Ordered at 16, wanted no more at 32, before its start is over."""
    pool = WorldPool(scaling=by_the_clock(1, 2, 1, interval=4), cold_start_s=20 * TICK_S)
    records = run_world(ask(0.0, 4, 60), ask(35 * TICK_S, 4, 5), ask(37 * TICK_S, 4, 5), pools=(pool,))
    assert records.requests.replica.tolist() == [0, 0, 0]
    assert spans(records) == [(0, 60), (16, 32)]


def test_what_is_paid_is_from_the_order_to_the_end(run_world, ask):
    """60 + 26 ticks of a replica of two devices."""
    pool = WorldPool(scaling=by_the_clock(1, 2, 1, interval=4), cold_start_s=5 * TICK_S)
    records = run_world(*(ask(tick * TICK_S, 4, num) for tick, num in [(0, 60), (22, 20)]), pools=(pool,))
    model: IterationModel = ToyModel(TICK_S)
    hardware = PoolHardware(model=model, price_usd_per_hour=10.0, num_devices=2)
    cost = summarise(records, pools=[hardware], slo=None)["cost"]
    assert cost["device_hours"] == pytest.approx(2 * 86 * TICK_S / 3600)
    assert cost["usd"] == pytest.approx(10 * 86 * TICK_S / 3600)


def test_requests_are_held_while_a_replica_starts_and_no_other_serves(run_world, ask):
    """The first crashes at 17, and the second, ordered at 16, is there at 21."""
    pool = WorldPool(scaling=by_the_clock(1, 2, 2, interval=16), cold_start_s=5 * TICK_S)
    crash = Scripted(kind=FailureKind.crash, at_s=17 * TICK_S, duration_s=100 * TICK_S, replicas=(0,))
    records = run_world(
        ask(18 * TICK_S, 4, 3), ask(19 * TICK_S, 4, 3), pools=(pool,), failures=Failures(events=(crash,))
    )
    requests = records.requests
    assert requests.replica.tolist() == [1, 1]
    assert (requests.wait_gateway_s / TICK_S).tolist() == [3, 2]
    assert (requests.first_token_s / TICK_S).tolist() == [22, 22]


def test_requests_that_are_held_for_a_replica_that_will_not_come_are_refused(run_world, ask):
    """The first crashes at 17; the second, ordered at 16, is called off at 32, and with it the wait."""
    pool = WorldPool(scaling=by_the_clock(1, 2, 1, interval=16), cold_start_s=50 * TICK_S)
    crash = Scripted(kind=FailureKind.crash, at_s=17 * TICK_S, duration_s=100 * TICK_S, replicas=(0,))
    records = run_world(ask(18 * TICK_S, 4, 3), pools=(pool,), failures=Failures(events=(crash,)))
    row = records.requests.iloc[0]
    assert (row.status, row.reason) == ("rejected", "no replica takes requests")
    assert (row.finished_s, row.wait_gateway_s) == (32 * TICK_S, 14 * TICK_S)


def test_a_request_that_finds_no_replica_waits_for_one_to_start(run_world, ask):
    """No replica is wanted from 16 on. At 20 one is ordered, ready at 25, first token at 26; it goes at 32,
    because at 28 it has work. At 40 the next one is ordered.
    """
    pool = WorldPool(scaling=by_the_clock(1, 0, 0, interval=4), cold_start_s=5 * TICK_S)
    asks = [ask(tick * TICK_S, 4, num) for tick, num in [(0, 3), (20, 5), (22, 1), (40, 3)]]
    records = run_world(*asks, pools=(pool,))
    requests = records.requests
    assert requests.replica.tolist() == [0, 1, 1, 2]
    assert (requests.wait_gateway_s / TICK_S).tolist() == [0, 5, 3, 5]
    assert (requests.first_token_s / TICK_S).tolist() == [1, 26, 26, 46]
    assert spans(records) == [(0, 16), (20, 32), (40, 48)]


def test_the_last_one_goes_only_when_it_has_nothing_to_do(run_world, ask):
    """It goes at 32, not at 16; the request at 33 gets another replica, ready at 38."""
    pool = WorldPool(scaling=by_the_clock(1, 0, 0, interval=16), cold_start_s=5 * TICK_S)
    records = run_world(ask(0.0, 4, 20), ask(33 * TICK_S, 4, 2), pools=(pool,))
    assert spans(records) == [(0, 32), (33, 40)]


def test_a_replica_that_is_down_and_will_be_back_is_not_replaced(run_world, ask):
    """No other is ordered in its place."""
    pool = WorldPool(scaling=by_the_clock(1, 0, 0, interval=16), cold_start_s=5 * TICK_S)
    crash = Scripted(kind=FailureKind.crash, at_s=8 * TICK_S, duration_s=12 * TICK_S, replicas=(0,))
    records = run_world(ask(9 * TICK_S, 4, 3), pools=(pool,), failures=Failures(events=(crash,)))
    assert records.requests.status.tolist() == ["rejected"]
    assert len(records.replicas) == 1


def test_pools_that_requests_are_not_held_for_keep_one():
    overrides = ["pools=disaggregated", "scaling=utilisation", "scaling.min_replicas=0"]
    cfg = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]).compose(overrides)
    message = r"pools.prefill.*scaling.min_replicas=0, role=prefill: must be >= 1"
    with pytest.raises(ConfigError, match=message):
        build_scenario(cfg)


def test_of_several_the_one_with_the_least_to_do_drains(run_world, ask):
    pool = WorldPool(replicas=3, scaling=by_the_clock(3, 2, 2, interval=16))
    records = run_world(
        *(ask(tick * TICK_S, 4, num) for tick, num in [(0, 30), (1, 5), (2, 40)]), pools=(pool,)
    )
    assert spans(records) == [(0, 42), (0, 16), (0, 42)]


def test_a_replica_that_is_down_goes_first_when_fewer_are_wanted(run_world, ask):
    """It is paid for until 16, and does not come back at 20."""
    pool = WorldPool(replicas=2, scaling=by_the_clock(2, 1, 1, interval=16))
    crash = Scripted(kind=FailureKind.crash, at_s=8 * TICK_S, duration_s=12 * TICK_S, replicas=(0,))
    records = run_world(
        ask(9 * TICK_S, 4, 30), ask(25 * TICK_S, 4, 2), pools=(pool,), failures=Failures(events=(crash,))
    )
    assert records.requests.replica.tolist() == [1, 1]
    assert spans(records) == [(0, 16), (0, 39)]


def test_a_crash_during_the_start_changes_nothing_nor_does_what_comes_after_it(run_world, ask):
    """It begins at 18 and lasts; the replica starts from 16 to 21, and is slow from 23 on."""
    pool = WorldPool(scaling=by_the_clock(1, 2, 2, interval=16), cold_start_s=5 * TICK_S)
    events = (
        Scripted(kind=FailureKind.crash, at_s=18 * TICK_S, duration_s=100 * TICK_S, pool="a"),
        Scripted(kind=FailureKind.straggler, at_s=23 * TICK_S, duration_s=100 * TICK_S, factor=2.0),
    )
    records = run_world(
        ask(17 * TICK_S, 4, 1), ask(22 * TICK_S, 4, 4), pools=(pool,), failures=Failures(events=events)
    )
    assert records.requests.replica.tolist() == [0, 1]
    assert records.requests.finished_s.tolist()[1] == (23 + 3 * 2) * TICK_S


def test_a_replica_that_was_down_is_not_busier_than_the_clock(run_world, ask):
    """Busy from 0 to 8 of each 16 ticks at most: never above 0.6, however long it was out of sight."""
    seen = []

    class Watched(Utilisation):
        __slots__ = ()

        def target(self, pool, now):
            seen.append(pool.busy_share)
            return 2

    pool = WorldPool(replicas=2, scaling=Watched(interval_s=16 * TICK_S))
    crash = Scripted(kind=FailureKind.crash, at_s=15 * TICK_S, duration_s=10 * TICK_S, replicas=(0,))
    asks = [ask(tick * TICK_S, 4, 8) for start in range(0, 64, 16) for tick in (start, start)]
    run_world(*asks, pools=(pool,), failures=Failures(events=(crash,)))
    assert seen[0] == 0.5
    assert max(seen) <= 1


@given(data=st.data())
def test_scaling_in_never_ends_work(data):
    """Without failures and impatient clients every request is sent once, and loses nothing."""
    world = replace(
        data.draw(draw_clusters()), failures=None, retries=None, patience_s=None, admission=AdmitAll()
    )
    requests = world.simulate().records.requests
    assert (requests.attempts <= 1).all()
    assert (requests.lost_tokens == 0).all()
    assert not requests.reason.isin(["its replica crashed", "no replica takes requests"]).any()
    assert requests.status.ne("aborted").all()


@pytest.mark.parametrize(
    ("lengths", "limits", "grows"),
    [
        (("8000", "20"), ("slo.ttft_ms=1000", "slo.tpot_ms=100"), "prefill"),
        (("100", "400"), ("slo.ttft_ms=1000", "slo.tpot_ms=9"), "decode"),
        (("8000", "20"), ("slo.ttft_ms=null", "slo.tpot_ms=null", "slo.e2e_ms=1500"), "prefill"),
    ],
)
def test_the_pool_that_misses_the_slo_is_scaled(lengths, limits, grows):
    """TTFT misses are the prefill pool's, TPOT misses the decode pool's, E2E misses the slower pool's."""
    config = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]).compose(
        [
            "model=qwen3_30b_a3b",
            "pools=disaggregated",
            "network=infiniband",
            "workload=poisson",
            "workload.arrivals.rate_per_s=8",
            f"workload.lengths.prompt_tokens.value={lengths[0]}",
            f"workload.lengths.output_tokens.value={lengths[1]}",
            "workload.num_requests=600",
            *limits,
            "cold_start=in_memory",
            "scaling=slo_attainment",
        ]
    )
    scenario = build_scenario(config)
    replicas = scenario.run().records.replicas
    names = list(scenario.pools_by_name)
    pools = [names[replica.pool] for replica in replicas]
    other = {"prefill": "decode", "decode": "prefill"}[grows]
    assert pools.count(grows) > 1
    assert pools.count(other) == 1
