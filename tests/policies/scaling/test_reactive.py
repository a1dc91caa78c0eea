"""Autoscalers that react to load: called directly, with hand-computed cases."""

import pytest

from policies.scaling.reactive import Concurrency, QueueLength, SloAttainment, Utilisation


def test_utilisation_is_the_formula_of_kubernetes(make_pool):
    """4 replicas at 90 %, target 60 %: ceil(4 x 1.5) = 6. At 64 % the ratio 1.07 is within the tolerance."""
    assert Utilisation(target_share=0.6, signal="busy").target(make_pool(4, busy_share=0.9), 15) == 6
    assert Utilisation(target_share=0.6, signal="busy").target(make_pool(4, busy_share=0.64), 15) == 4


def test_each_signal_reads_its_own_count(make_pool):
    pool = make_pool(2, busy_share=0.9, kv_usage=0.6, num_running=6, max_concurrency=10)
    wanted = {signal: Utilisation(target_share=0.3, signal=signal) for signal in ("busy", "kv", "running")}
    assert {name: policy.target(pool, 15) for name, policy in wanted.items()} == {
        "busy": 6,
        "kv": 4,
        "running": 2,
    }
    pool.max_concurrency = None
    assert Utilisation(target_share=0.3, signal="running").target(pool, 15) == 4, "then by KV"


def test_replicas_that_start_are_not_asked_for_again(make_pool):
    policy = Utilisation(target_share=0.5, signal="busy")
    assert policy.target(make_pool(2, busy_share=1.0), 15) == 4
    assert policy.target(make_pool(2, num_starting=2, busy_share=1.0), 30) == 4


def test_replicas_go_when_they_were_not_wanted_for_the_whole_window(make_pool):
    policy = Utilisation(target_share=0.5, signal="busy", stabilisation_s=60)
    assert policy.target(make_pool(4, busy_share=0.5), 0) == 4
    idle = make_pool(4, busy_share=0.1)
    assert [policy.target(idle, now) for now in (15, 30, 45, 60)] == [4, 4, 4, 1]


def test_the_window_begins_with_the_run(make_pool):
    policy = Utilisation(target_share=0.5, signal="busy", stabilisation_s=60)
    idle = make_pool(4, busy_share=0.1)
    assert [policy.target(idle, now) for now in (15, 30, 60, 75)] == [4, 4, 4, 1]


def test_a_crashed_replica_is_wanted_still(make_pool):
    policy = Utilisation(target_share=0.5, signal="busy", stabilisation_s=0)
    assert policy.target(make_pool(4, busy_share=0.5), 15) == 4
    assert policy.target(make_pool(3, busy_share=0.5), 30) == 4


def test_overload_asks_for_no_fewer_than_are_on_their_way(make_pool):
    policy = Utilisation(target_share=0.5, signal="busy", stabilisation_s=0)
    assert policy.target(make_pool(3, busy_share=1.0), 15) == 6
    assert policy.target(make_pool(2, num_starting=3, busy_share=1.0), 30) == 6, "2 at 100 % want 4"


def test_steps_and_cooldowns_hold_back_both_ways(make_pool):
    policy = Utilisation(
        target_share=0.5,
        signal="busy",
        stabilisation_s=0,
        max_replicas=20,
        max_step_out=2,
        max_step_in=1,
        scale_out_cooldown_s=60,
        scale_in_cooldown_s=120,
    )
    busy, idle = make_pool(4, busy_share=1.0), make_pool(8, busy_share=0.0)
    assert [policy.target(busy, now) for now in (0, 30, 60, 90)] == [6, 6, 8, 8]
    assert [policy.target(idle, now) for now in (120, 179, 180, 240, 300)] == [8, 8, 7, 7, 6]


def test_concurrency_is_the_formula_of_knative(make_pool):
    """100 in flight, 10 a replica at 70 %: ceil(100 / 7) = 15."""
    policy = Concurrency(target_concurrency=10, max_replicas=50)
    assert policy.target(make_pool(10, num_outstanding=100), 2) == 15


def test_concurrency_is_averaged_over_the_stable_window(make_pool):
    """7 a replica. 21, 21, ..., then 28 for half of the window: a mean of 24.5, ceil(3.5) = 4."""
    policy = Concurrency(target_concurrency=10, stable_window_s=60)
    for now in range(2, 62, 2):
        assert policy.target(make_pool(3, num_outstanding=21), now) == 3
    later = [policy.target(make_pool(3, num_outstanding=28), now) for now in range(62, 122, 2)]
    assert later[0] == 4, "any part above 21 is"
    assert policy.target(make_pool(4, num_outstanding=28), 122) == 4


def test_a_burst_is_a_panic_and_nothing_goes_until_it_is_over(make_pool):
    """Stable: mean of 30 samples. 1 replica, 7 each: 70 in flight for 6 s want 10 >= 2 replicas, at once."""
    policy = Concurrency(target_concurrency=10, max_replicas=20, stable_window_s=60, panic_window_s=6)
    for now in range(2, 62, 2):
        policy.target(make_pool(1, num_outstanding=7), now)
    calm = Concurrency(target_concurrency=10, max_replicas=20, panic_threshold=1000)
    for now in range(2, 62, 2):
        calm.target(make_pool(1, num_outstanding=7), now)
    burst = make_pool(1, num_outstanding=70)
    assert [policy.target(burst, now) for now in (62, 64, 66)] == [4, 7, 10]
    assert [calm.target(burst, now) for now in (62, 64, 66)] == [2, 2, 2]
    targets = {now: policy.target(make_pool(10, num_outstanding=7), now) for now in range(68, 140, 2)}
    assert [targets[now] for now in (68, 100, 126)] == [10, 10, 10]
    assert targets[128] == 5, "62 s after the last panic; half of those that are up at a time"


@pytest.mark.parametrize(("threshold", "later"), [(2.0, 2), (2.5, 1)])
def test_the_threshold_itself_is_a_panic(threshold, later, make_pool):
    """7 a replica: 14 in flight want 2, twice the one that is up."""
    policy = Concurrency(target_concurrency=10, panic_threshold=threshold)
    assert policy.target(make_pool(1, num_outstanding=14), 2) == 2
    assert policy.target(make_pool(1, num_outstanding=0), 4) == later


def test_a_queue_asks_for_its_share_beyond_those_that_start(make_pool):
    policy = QueueLength(max_waiting=5, max_step_out=None, max_replicas=20)
    assert policy.target(make_pool(2, num_waiting=10, num_running=20), 15) == 2
    assert policy.target(make_pool(2, num_waiting=30, num_running=20), 30) == 6
    assert policy.target(make_pool(2, num_starting=4, num_waiting=30, num_running=20), 45) == 6
    assert policy.target(make_pool(2, num_starting=4, num_waiting=31, num_running=20), 60) == 7


@pytest.mark.parametrize(
    ("counts", "wanted"),
    [
        ({"num_running": 14, "kv_usage": 0.4}, 2),  # of 20 slots: 70 %, and 0.4 x 3 / 2 = 60 % of the KV
        ({"num_running": 15, "kv_usage": 0.4}, 3),
        ({"num_running": 1, "kv_usage": 0.47}, 3),  # 70.5 %
        ({"num_running": 15, "kv_usage": 0.4, "max_concurrency": None}, 2),
    ],
)
def test_a_replica_goes_after_a_calm_if_the_rest_has_room(counts, wanted, make_pool):
    policy = QueueLength(calm_s=60, max_fill_share=0.7)
    targets = [policy.target(make_pool(3, **counts), now) for now in (15, 60, 75)]
    assert targets == [3, 3, wanted]


def test_no_replica_goes_while_others_start(make_pool):
    policy = QueueLength(calm_s=60)
    targets = [policy.target(make_pool(3, num_starting=num), now) for num, now in ((0, 0), (1, 60), (0, 75))]
    assert targets == [3, 3, 2]


def test_a_wait_ends_the_calm(make_pool):
    policy = QueueLength(calm_s=60)
    policy.target(make_pool(3), 0)
    policy.target(make_pool(3, num_waiting=1), 45)
    assert [policy.target(make_pool(3), now) for now in (60, 90, 105)] == [3, 3, 2]
    assert policy.target(make_pool(2), 120) == 2, "one at a time"


def test_missed_slos_ask_for_more_in_proportion(make_pool):
    """Target 95 %. Of 100 that ended 93 met it: 4 + ceil(4 x 0.02) = 5; 45 of 100: 4 + ceil(4 x 0.5) = 6."""
    pools = [make_pool(4, num_arrivals=100, num_ended=100, num_met=met) for met in (95, 93, 45)]
    assert [SloAttainment(target_share=0.95).target(pool, 30) for pool in pools] == [4, 5, 6]


def test_attainment_is_of_those_that_ended_since(make_pool):
    policy = SloAttainment(target_share=0.9)
    policy.target(make_pool(2, num_arrivals=100, num_ended=100, num_met=100), 30)
    assert policy.target(make_pool(2, num_arrivals=120, num_ended=110, num_met=105), 60) == 3


def test_missed_slos_wait_for_replicas_that_start(make_pool):
    policy = SloAttainment(target_share=0.95)
    assert policy.target(make_pool(4, num_arrivals=9, num_ended=100, num_met=45), 30) == 6
    assert policy.target(make_pool(4, num_starting=2, num_arrivals=9, num_ended=200, num_met=90), 60) == 6


def test_a_backlog_that_is_worked_off_teaches_nothing(make_pool):
    """2 replicas miss at 6/s, and go on missing at 1/s while the queue lasts. Only 3/s each was too much.

    So with 3 replicas 5/s may go down to 2: 5 <= 2 x 3 x 0.9. 0.5/s each would have forbidden it.
    """
    policy = SloAttainment(calm_s=60, margin=0.9)
    policy.target(make_pool(2, num_arrivals=180, num_ended=100, num_met=94), 30)
    policy.target(make_pool(2, num_starting=1, num_arrivals=210, num_ended=200, num_met=100), 60)
    calm = [
        policy.target(
            make_pool(3, num_arrivals=210 + 150 * i, num_ended=200 + 100 * i, num_met=100 + 100 * i),
            60 + 30 * i,
        )
        for i in (1, 2)
    ]
    assert calm == [3, 2]


def test_what_was_too_much_is_not_tried_again_until_it_is_forgotten(make_pool):
    """3 replicas at 6/s miss the SLO: 2/s each was too much, so at 4 replicas 6/s may not go down to 3.

    5.4/s may: 3 x 2 x 0.9.
    """
    policy = SloAttainment(calm_s=60, margin=0.9, forget_s=1000)
    now, arrived, ended, met = 0, 0, 0, 0

    def ask(num_replicas, rate_per_s, share):
        nonlocal now, arrived, ended, met
        now, arrived, ended = now + 30, arrived + 30 * rate_per_s, ended + 100
        met += 100 * share
        pool = make_pool(num_replicas, num_arrivals=arrived, num_ended=ended, num_met=met)
        return policy.target(pool, now)

    assert ask(3, 6, 0.9) == 4
    assert [ask(4, 6, 1) for _ in range(6)] == [4] * 6
    assert ask(4, 5.4, 1) == 3
    while ask(3, 6, 1) == 3:
        assert now < 2000
    assert now == 1050, "learnt at 30 s, and 3/s each are more than 2/s each until more than 1000 s later"


@pytest.mark.parametrize(
    ("policy", "settings", "message"),
    [
        (
            Utilisation,
            {"min_replicas": 9},
            "min_replicas=9: must be <= max_replicas=8; lower min_replicas or raise",
        ),
        (Utilisation, {"min_replicas": -1}, "min_replicas=-1: must be >= 0"),
        (Utilisation, {"min_replicas": 0, "max_replicas": 0}, "max_replicas=0: must be >= 1"),
        (Utilisation, {"interval_s": 0}, "interval_s=0: must be a finite number > 0 s"),
        (Utilisation, {"signal": "cpu"}, "signal=cpu: must be one of busy, kv, running"),
        (Utilisation, {"target_share": 60}, "target_share=60: must be a share, > 0 and <= 1"),
        (Utilisation, {"tolerance": -0.1}, "tolerance=-0.1: must be a finite number >= 0"),
        (Utilisation, {"stabilisation_s": float("nan")}, "stabilisation_s=nan: must be a finite number"),
        (Utilisation, {"max_step_in": 0}, "max_step_in=0: must be >= 1 replica, or null for no limit"),
        (Concurrency, {"target_concurrency": 0}, "target_concurrency=0: must be a finite number > 0"),
        (Concurrency, {"panic_window_s": 61}, "panic_window_s=61: must be <= stable_window_s=60.0 s"),
        (Concurrency, {"panic_threshold": 1}, "panic_threshold=1: must be > 1"),
        (QueueLength, {"max_waiting": 0}, "max_waiting=0: must be a finite number > 0 requests"),
        (QueueLength, {"max_fill_share": 1.2}, "max_fill_share=1.2: must be a share"),
        (SloAttainment, {"target_share": 0}, "target_share=0: must be a share"),
        (SloAttainment, {"forget_s": 0}, "forget_s=0: must be a finite number > 0 s"),
    ],
)
def test_rejects_settings_that_make_no_sense(policy, settings, message):
    with pytest.raises(ValueError, match=message):
        policy(**settings)
