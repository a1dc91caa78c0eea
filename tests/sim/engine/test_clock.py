"""Simulated time: absolute, ordered by phase within an instant."""

from math import inf

import pytest
import simpy

from sim.engine.clock import Clock, Interrupt, Phase


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
    assert clock.run_some(1, inf, Interrupt())
    assert not clock.run_some(1, inf, Interrupt())  # nothing is left


def test_it_runs_what_a_user_of_simpy_writes():
    """Processes, timeouts, resources, stores, conditions and interrupts, as in any other environment."""
    clock, log = Clock(), []
    desk, mail = simpy.Resource(clock), simpy.Store(clock)

    def visitor(name, stays_s):
        with desk.request() as turn:
            yield turn
            yield clock.timeout(stays_s)
            log.append((clock.now, name))
            yield mail.put(name)

    def reader():
        found = yield mail.get()
        first = yield clock.any_of([mail.get(), clock.timeout(100, "late")])
        log.append((clock.now, found, list(first.values())))
        try:
            yield clock.event()
        except simpy.Interrupt as interrupt:
            log.append((clock.now, interrupt.cause))

    def closer(process):
        yield clock.timeout(8)
        process.interrupt("closed")

    clock.process(visitor("a", 2))
    clock.process(visitor("b", 3))
    clock.process(closer(clock.process(reader())))
    assert not clock.run_some(100, inf, Interrupt())
    assert log == [(2, "a"), (5, "b"), (5, "a", ["b"]), (8, "closed")]


def test_events_of_simpy_are_in_the_phase_control_and_processes_begin_before_it():
    clock, log = Clock(), []

    def process():
        log.append("process begins")
        yield clock.timeout(0)
        log.append("its timeout")

    def begin(event):
        clock.at(1.0, Phase.plan, lambda event: log.append("plan"))
        clock.at(1.0, Phase.control, lambda event: log.append("control"))
        clock.at(1.0, Phase.arrive, lambda event: log.append("arrive"))
        clock.process(process())

    clock.at(1.0, Phase.commit, begin)
    clock.run_some(100, inf, Interrupt())
    assert log == ["arrive", "process begins", "control", "its timeout", "plan"]


def test_a_process_reaches_an_absolute_time_to_the_last_bit_and_an_error_in_it_is_raised_as_it_is():
    clock, error = Clock(), ValueError("mine")

    def process():
        yield clock.at(0.2, Phase.arrive)
        yield clock.at(0.9, Phase.arrive)
        assert clock.now == 0.9
        raise error

    clock.begin(process())
    with pytest.raises(ValueError, match="mine") as raised:
        clock.run_some(100, inf, Interrupt())
    assert raised.value is error


def test_it_stops_before_the_next_event_and_goes_on_later():
    clock, log, interrupt = Clock(), [], Interrupt()
    for time_s in (1.0, 2.0, 3.0):
        clock.at(time_s, 0, lambda event: log.append(clock.now))
    clock.at(1.0, 1, lambda event: setattr(interrupt, "noted", True))
    assert not clock.run_some(100, inf, interrupt)
    assert log == [1.0]
    clock.at(2.0, 1, lambda event: clock.stop())
    assert not clock.run_some(100, inf, Interrupt())
    assert log == [1.0, 2.0]
    clock.is_stopped = False
    assert not clock.run_some(100, inf, Interrupt())
    assert log == [1.0, 2.0, 3.0]
    assert clock.peek() == inf
