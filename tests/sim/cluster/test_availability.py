"""k of n up: theory, simulation, and each against the other."""

from math import exp

import pytest

from sim.cluster.availability import (
    at_least_up,
    availability,
    replicas_for,
    simulated_at_least_up,
    simulated_kv_copies_left,
)
from sim.cluster.failures import Failures, Random, Scripted
from sim.records.run import FailureKind


def failing(**changed):
    plain = {"kind": FailureKind.crash, "mtbf_s": 1000.0, "mttr_s": 250.0}
    return Failures(events=(Random(**{**plain, **changed}),))


def test_the_worked_numbers():
    up = availability(30 * 24 * 3600, 2 * 3600)
    assert up == pytest.approx(0.99723, abs=1e-5)
    assert at_least_up(8, 8, up) == pytest.approx(0.9781, abs=1e-4)
    assert at_least_up(8, 9, up) == pytest.approx(0.99973, abs=1e-5)


def test_two_of_three_by_hand():
    """a^3 + 3 a^2 (1 - a), a = 0.8: 0.512 + 0.384."""
    assert at_least_up(2, 3, 0.8) == pytest.approx(0.896)
    assert (at_least_up(1, 1, 0.8), at_least_up(1, 2, 0.8)) == pytest.approx((0.8, 0.96))


def test_how_many_are_enough():
    """At a = 0.8 one is up 80 %, one of two 96 %, one of three 99.2 %."""
    assert [replicas_for(1, 0.8, wanted) for wanted in (0.8, 0.81, 0.96, 0.97)] == [1, 2, 2, 3]
    with pytest.raises(ValueError, match=r"wanted_share=0.9: 3 replicas, each up for 0.1 of the time, are"):
        replicas_for(1, 0.1, 0.9, most=3)


@pytest.mark.parametrize("shapes", [(1.0, 1.0), (2.0, 0.7)], ids=["exponential", "weibull"])
@pytest.mark.parametrize(("k", "n"), [(3, 3), (3, 4), (3, 5)])
def test_simulation_matches_theory(k, n, shapes):
    """A 99.9 % interval of 3,000 replications holds the binomial; down is 20 % of the time."""
    failures = failing(failure_shape=shapes[0], repair_shape=shapes[1])
    found = simulated_at_least_up(failures, k, n, at_s=8000, num_replications=3000, confidence=0.999)
    theory = at_least_up(k, n, availability(1000, 250))
    assert found.low <= theory <= found.high
    assert found.high - found.low < 0.07
    assert at_least_up(k, n, 0.7) < found.low, "another availability would be noticed"


def test_early_in_a_run_more_are_up():
    """Two states, exponential: down at t with (1 - a) (1 - exp(-t / mtbf - t / mttr))."""
    at_s = 100.0
    found = simulated_at_least_up(failing(), 1, 1, at_s=at_s, num_replications=4000, confidence=0.999)
    up = 1 - 0.2 * (1 - exp(-at_s / 1000 - at_s / 250))
    assert found.low <= up <= found.high


def test_spares_that_fail_together_are_no_spares():
    failures = failing(together=True)
    one = simulated_at_least_up(failures, 1, 1, at_s=8000, num_replications=500)
    one_of_three = simulated_at_least_up(failures, 1, 3, at_s=8000, num_replications=500)
    assert one.num_true > 0
    assert one_of_three.share < 0.9 < at_least_up(1, 3, 0.8)


def test_the_interval_is_clopper_pearsons():
    """Never a failure in 100: from (0.025)^(1/100) to 1."""
    found = simulated_at_least_up(Failures(), 1, 1, at_s=10, num_replications=100)
    assert (found.num_true, found.share, found.high) == (100, 1.0, 1.0)
    assert found.low == pytest.approx(0.025 ** (1 / 100))


def test_slow_replicas_are_up_and_lost_ones_are_not():
    def share(kind, **settings):
        event = Scripted(kind=kind, at_s=1, duration_s=100, replicas=(0,), **settings)
        return simulated_at_least_up(Failures(events=(event,)), 2, 2, at_s=50, num_replications=1).share

    assert share(FailureKind.straggler, factor=2) == share(FailureKind.link_slow, factor=2) == 1
    assert share(FailureKind.crash) == share(FailureKind.link_down) == 0
    assert share(FailureKind.host_out_of_memory) == 0


def test_a_copy_is_left_unless_it_goes_at_the_same_time():
    """4 replicas: 0 crashes, its copy on 1 stays. 1 and 2 together: 1's is 2, gone; 2's is 3. 3, alone now,
    has none. Replica 2 is out of reach at 5 when 1, up again at 4, crashes: its copy is on 3.
    """

    def at(at_s, duration_s, *replicas, kind=FailureKind.crash):
        return Scripted(kind=kind, at_s=at_s, duration_s=duration_s, replicas=replicas)

    def left(*events):
        found = simulated_kv_copies_left(Failures(events=events), 4, until_s=100, num_replications=1)
        return found and (found.num_true, found.num_replications)

    assert left(at(1, 50, 0)) == (1, 1)
    assert left(at(1, 50, 0), at(2, 50, 1, 2)) == (2, 3)
    assert left(at(1, 50, 0), at(2, 50, 1, 2), at(3, 50, 3)) == (2, 4)
    assert left(at(1, 3, 1), at(4.5, 9, 2, kind=FailureKind.link_down), at(5, 9, 1)) == (2, 2)
    assert left(at(1, 3, 1, kind=FailureKind.link_down)) is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: availability(0, 1), "mtbf_s=0: must be > 0 s"),
        (lambda: at_least_up(3, 2, 0.5), "k=3: must be from 1 to n=2"),
        (lambda: at_least_up(0, 2, 0.5), "k=0: must be from 1 to n=2"),
        (lambda: replicas_for(1, 0.5, 1.0), "wanted_share=1.0: must be > 0 and < 1"),
        (
            lambda: simulated_at_least_up(Failures(), 1, 1, at_s=1, num_replications=0),
            "num_replications=0: must be >= 1",
        ),
    ],
)
def test_rejects_questions_without_an_answer(call, message):
    with pytest.raises(ValueError, match=message):
        call()
