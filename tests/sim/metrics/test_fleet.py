"""Failures, retries, scaling and pools in figures, worked out by hand in ticks of one iteration."""

import pytest

from experiments.conformance.toys import ToyModel
from policies.admission.queue_bound import QueueBound
from policies.routing.load_balancing import LeastOutstanding
from policies.scaling.scheduled import Scheduled
from sim.cluster.clients import Retries
from sim.cluster.failures import Failures, Scripted
from sim.metrics.definitions import Window
from sim.metrics.figure import PoolHardware
from sim.metrics.fleet import failure_use, replicas_over_time, scaling_use
from sim.metrics.summary import summarise
from sim.records.run import FailureKind
from tests.sim.metrics.figures_of import pool_figures, retry_use
from tests.worlds.clusters import WorldPool

TICK_S = 0.125


def crash(at, duration, *replicas):
    event = Scripted(
        kind=FailureKind.crash, at_s=at * TICK_S, duration_s=duration * TICK_S, replicas=replicas
    )
    return Failures(events=(event,))


@pytest.fixture
def scaled(make_world, ask):
    """Returns records with a second replica: ordered at tick 16, serves from 21 to 32, gone at 42.

    The run ends at tick 60.
    """
    shifts = [{"at": at, "replicas": n} for at, n in [("00:00", 1), ("08:00", 2), ("16:00", 1)]]
    scaling = Scheduled(interval_s=4 * TICK_S, entries=tuple(shifts), day_s=48 * TICK_S)
    pool = WorldPool(scaling=scaling, cold_start_s=5 * TICK_S)
    asks = [ask(0.0, 4, 60), ask(22 * TICK_S, 4, 20)]
    return make_world(*asks, pools=(pool,), routing=LeastOutstanding()).simulate().records


NOTHING_KEPT = dict.fromkeys(
    ("resumed", "recomputed_tokens", "restored_tokens", "restored_bytes", "mirrored_bytes"), 0
)


def test_a_crash_is_reported_with_what_it_cost(make_world, ask):
    """Down from 3.5 to the end at 13.5, of two replicas for 13.5 ticks each."""
    world = make_world(ask(0.0, 4, 10), num_replicas=2, failures=crash(3.5, 90, 0), max_resends=1)
    assert failure_use(world.simulate().records) == {
        "by_kind": {"crash": {"count": 1, "replica_s": 10 * TICK_S}},
        "crashes": 1,
        "replica_down_s": 10 * TICK_S,
        "down_share": pytest.approx(10 / 27),
        "lost_tokens": 3,
        "resends": 1,
        **NOTHING_KEPT,
        "recomputed_tokens": 4 + 3 - 1,
    }


def test_a_run_without_failures_has_none(make_world, ask):
    records = make_world(ask(0.0, 4, 10)).simulate().records
    nothing = {"crashes": 0, "replica_down_s": 0, "down_share": 0, "lost_tokens": 0, "resends": 0}
    assert failure_use(records) == {"by_kind": {}, **nothing, **NOTHING_KEPT}
    figures = retry_use(records)
    alone = {"attempts": 1, "retries": 0, "attempts_per_request": 1, "failed_attempts": {}}
    assert figures == {**alone, "lost_tokens": 0}


def test_attempts_are_counted_whatever_became_of_them(make_world, ask):
    """The second request comes at 1, 3 and 7, in vain, and at 15; the third is too long, and comes once."""
    records = (
        make_world(
            ask(0.0, 4, 10),
            ask(1 * TICK_S, 4, 3),
            ask(40 * TICK_S, 50, 2),
            max_model_len=40,
            admission=QueueBound(max_outstanding=1),
            retries=Retries(max_attempts=4, base_s=2 * TICK_S, jitter="none"),
        )
        .simulate()
        .records
    )
    assert records.requests.tries.tolist() == [1, 4, 1]
    assert retry_use(records) == {
        "attempts": 6,
        "retries": 3,
        "attempts_per_request": 2,
        "failed_attempts": {"can never be served": 1, "queue bound of the replica": 3},
        "lost_tokens": 0,
    }


def test_failures_that_crash_nothing_are_reported_by_kind(make_world, ask):
    """Twice as slow from 2 to 6: tokens 3 and 4 take 2 ticks each; the run ends at 12."""
    slow = Scripted(kind=FailureKind.straggler, at_s=2 * TICK_S, duration_s=4 * TICK_S, factor=2.0)
    records = make_world(ask(0.0, 4, 10), failures=Failures(events=(slow,))).simulate().records
    assert records.end_s == 12 * TICK_S
    figures = failure_use(records)
    assert figures["by_kind"] == {"straggler": {"count": 1, "replica_s": 4 * TICK_S}}
    assert (figures["crashes"], figures["lost_tokens"]) == (0, 0)


def test_tokens_for_a_client_that_has_left_are_not_lost_in_a_crash(make_world, ask):
    """Both attempts are given up 3.5 ticks after they came, and end with that iteration, after 4 tokens."""
    retries = Retries(max_attempts=2, base_s=0, jitter="none", timeout_s=3.5 * TICK_S)
    records = make_world(ask(0.0, 4, 6), retries=retries, until_s=40 * TICK_S).simulate().records
    assert failure_use(records)["lost_tokens"] == 0
    assert retry_use(records)["lost_tokens"] == records.requests.lost_tokens.sum() == 8


def test_what_the_service_sends_again_is_no_attempt_of_a_client(make_world, ask):
    world = make_world(ask(0.0, 4, 10), num_replicas=2, failures=crash(3.5, 90, 0), max_resends=1)
    records = world.simulate().records
    assert (records.requests.tries[0], records.requests.attempts[0]) == (1, 2)
    assert retry_use(records)["attempts"] == 1


def test_replicas_that_come_and_go_are_reported(scaled):
    figures = scaling_use(scaled, num_devices=[2])
    assert figures == {
        "mean_replicas": pytest.approx((60 + 26) / 60),
        "mean_serving": pytest.approx((60 + 11) / 60),
        "max_replicas": 2,
        "starts": 1,
        "drains": 1,
        "device_hours": pytest.approx(2 * 86 * TICK_S / 3600),
    }


def test_replicas_are_counted_by_what_they_do(scaled):
    times_s, counts = replicas_over_time(scaled)
    assert (times_s / TICK_S).tolist() == [0, 16, 21, 32, 42, 60]
    assert {name: count.tolist() for name, count in counts.items()} == {
        "wanted": [1, 2, 2, 1, 1, 0],
        "starting": [0, 1, 0, 0, 0, 0],
        "serving": [1, 1, 2, 1, 1, 0],
        "draining": [0, 0, 0, 1, 0, 0],
        "down": [0, 0, 0, 0, 0, 0],
    }


def test_a_replica_that_is_down_is_wanted_and_does_not_serve(make_world, ask):
    world = make_world(ask(0.0, 4, 20), num_replicas=2, routing=LeastOutstanding(), failures=crash(3, 10, 1))
    times_s, counts = replicas_over_time(world.simulate().records)
    assert (times_s / TICK_S).tolist() == [0, 3, 13, 20]
    assert counts["down"].tolist() == [0, 1, 0, 0]
    assert counts["serving"].tolist() == [2, 1, 2, 0]
    assert counts["wanted"].tolist() == [2, 2, 2, 0]


def test_each_pool_has_its_part_of_the_figures(make_world, ask):
    """One of 10 tokens on the first pool, two of 5 on the second, whose ticks are twice as long."""
    models = ToyModel(TICK_S, flat=True), ToyModel(2 * TICK_S, flat=True)
    pools = tuple(WorldPool(model=model) for model in models)
    asks = [ask(0.0, 4, 10), ask(0.0, 4, 5), ask(11 * TICK_S, 4, 1)]
    records = make_world(*asks, pools=pools).simulate().records
    hardware = [
        PoolHardware(model=model, price_usd_per_hour=usd, num_devices=num)
        for model, usd, num in zip(models, (1.0, 10.0), (1, 2), strict=True)
    ]
    window = Window(0.0, records.end_s)
    figures = pool_figures(records, window, hardware)
    assert records.requests.replica.tolist() == [0, 1, 0]
    hours = 12 * TICK_S / 3600
    first, second = figures["a"], figures["b"]
    assert (first["requests"], second["requests"]) == (2, 1)
    assert (first["gpu_busy"], second["gpu_busy"]) == pytest.approx((11 / 12, 10 / 12))
    assert (first["device_hours"], second["device_hours"]) == pytest.approx((hours, 2 * hours))
    assert (first["usd"], second["usd"]) == pytest.approx((hours, 10 * hours))
    # Tokens are FLOPs to the toy, a second of it can do one: 4 + 9 + 4 of the first, 4 + 4 of the second.
    assert (first["mfu"], second["mfu"]) == pytest.approx((17 / (12 * TICK_S), 8 / (12 * TICK_S)))
    summary = summarise(records, pools=hardware, slo=None)
    assert summary["by_pool"]["b"]["usd"] == second["usd"]
    assert summary["cost"]["usd"] == pytest.approx(first["usd"] + second["usd"])
    assert summary["mfu"] == pytest.approx((first["mfu"] + second["mfu"]) / 2)
