"""The age of the counts that a router sees."""

import pytest

from policies.gateway.gateway import check_age
from policies.gateway.signals import AgedSignals, Counts


class SetClock:
    now = 0.0


@pytest.fixture
def clock():
    return SetClock()


def test_counts_are_those_before_the_last_refresh(clock):
    signals = AgedSignals(clock, age_s=1.0)
    assert signals.num_running == 0
    signals.publish(Counts(num_running=1), 0.2)
    signals.publish(Counts(num_running=2), 0.7)
    clock.now = 0.9
    assert signals.num_running == 0
    clock.now = 1.1
    assert signals.num_running == 2
    signals.publish(Counts(num_running=3), 1.5)
    clock.now = 1.9
    assert signals.num_running == 2


def test_without_an_age_counts_are_current(clock):
    signals = AgedSignals(clock, age_s=0)
    signals.publish(Counts(num_running=1), 0.0)
    clock.now = 0.1
    assert signals.num_running == 1
    signals.publish(Counts(num_running=2), 0.5)
    clock.now = 0.6
    assert signals.num_running == 2


@pytest.mark.parametrize("age_s", [-1.0, 1e-9, float("inf"), float("nan")])
def test_rejects_an_age_that_is_none(age_s):
    with pytest.raises(ValueError, match="signal_age_s"):
        check_age(age_s)
