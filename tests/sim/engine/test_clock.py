"""Simulated time: absolute, ordered by phase within an instant."""

from math import inf

from sim.engine.clock import Clock, Phase
from sim.engine.interrupt import Interrupt


def log_of(*settings):
    """Runs the events (time, priority, name); returns (now, name) in the order in which they happen."""
    clock, log = Clock(), []
    for time_s, priority, name in settings:
        clock.at(time_s, priority, lambda event, name=name: log.append((clock.now, name)))
    assert not clock.run_some(100, inf, Interrupt())
    return log


def test_events_go_by_time_then_phase_then_order_of_setting():
    assert log_of(
        (2.0, Phase.commit, "late"),
        (1.0, Phase.plan, "plans"),
        (1.0, Phase.arrive, "arrives"),
        (1.0, Phase.arrive, "arrives too"),
        (1.0, Phase.abort, "an aborted request ends"),
        (1.0, Phase.commit + 1, "second replica commits"),
        (1.0, Phase.commit, "first replica commits"),
    ) == [
        (1.0, "first replica commits"),
        (1.0, "second replica commits"),
        (1.0, "an aborted request ends"),
        (1.0, "arrives"),
        (1.0, "arrives too"),
        (1.0, "plans"),
        (2.0, "late"),
    ]


def test_times_are_reached_to_the_last_bit():
    """0.2 + (0.9 - 0.2) is not 0.9 in binary: a delay would miss it."""
    assert 0.2 + (0.9 - 0.2) != 0.9
    clock, log = Clock(), []
    clock.at(0.2, 0, lambda event: clock.at(0.9, 0, lambda event: log.append(clock.now)))
    clock.run_some(100, inf, Interrupt())
    assert log == [0.9]


def test_run_some_stops_at_the_count_and_at_the_limit_included():
    clock, log = Clock(), []
    for time_s in (1.0, 2.0, 3.0, 4.0):
        clock.at(time_s, 0, lambda event: log.append(clock.now))
    assert clock.run_some(2, inf, Interrupt())
    assert log == [1.0, 2.0]
    assert not clock.run_some(100, 3.0, Interrupt())
    assert log == [1.0, 2.0, 3.0]
    assert clock.now == 3.0
