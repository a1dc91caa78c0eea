"""Runs are corrected by the machine's pace, repeated if it varied, and refused a verdict if it still did."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from experiments.calibrate.engine import pace
from experiments.calibrate.engine.pace import Pace
from experiments.validate.engine.noise import MORE_RUNS, quiet_runs, refusal_of
from experiments.validate.engine.paced import NEAR, REST, PacedClock

CALM = {"median": 1.0, "p10": 0.98, "p90": 1.05}
NOISY = {"median": 1.1, "p10": 0.98, "p90": 1.3125}
WORST = {"median": 1.3, "p10": 0.9, "p90": 2.0}


@pytest.fixture(autouse=True)
def _a_quarter(monkeypatch):
    monkeypatch.setattr(pace, "MOST_VARIATION", 0.25)
    monkeypatch.setattr(pace, "LEAST_CORE_SHARE", 0.8)


class Machine:
    """A machine whose reference step takes 2 ms, and as many times as long as `slower` says."""

    def __init__(self, monkeypatch):
        self.now_s, self.slower = 5.0, 1.0
        self.others_s = 0.0
        monkeypatch.setattr("time.thread_time", lambda: self.now_s)
        monkeypatch.setattr("time.perf_counter", lambda: self.now_s + self.others_s)

    def work(self, seconds):
        self.now_s += seconds * self.slower

    def clock(self):
        return PacedClock(lambda: self.work(2e-3), 2e-3)


def runs_of(*paces, calibration=None):
    """Returns a function that returns one recording after the other."""
    found = iter([SimpleNamespace(engine={"pace": pace, "calibration_pace": calibration}) for pace in paces])
    return lambda: next(found)


def test_work_takes_as_long_as_in_the_calibration(monkeypatch):
    machine = Machine(monkeypatch)
    machine.slower = 1.6
    clock = machine.clock()
    for slower in (1.6, 1.2):
        machine.slower = slower
        for _ in range(NEAR):  # the first ones see the change
            machine.work(REST * 3e-3)
            clock.look()
        begin_s = clock.now()
        machine.work(5e-3)
        assert clock.now() - begin_s == pytest.approx(5e-3)
    clock.sleep(1.0)
    assert clock.now() - begin_s == pytest.approx(1.005)


def test_the_pace_counts_before_during_and_after_the_run(monkeypatch):
    machine = Machine(monkeypatch)
    clock = machine.clock()
    assert clock.end() == pytest.approx((1.0, 1.0, 1.0, 1.0))
    machine.slower = 1.5
    machine.others_s = machine.now_s - 5.0 + NEAR * 3e-3
    assert clock.end() == pytest.approx((1.0, 1.0, 1.5, 0.5))


def test_the_clock_stands_still_during_reference_steps(monkeypatch):
    machine = Machine(monkeypatch)
    clock = machine.clock()
    begin_s = clock.now()
    clock.look()
    assert clock.now() == begin_s
    machine.work(REST * 2e-3 * 1.1)
    clock.look()
    assert clock.now() - begin_s == pytest.approx(REST * 2e-3 * 1.1)


def test_noisy_runs_are_repeated_and_the_quietest_is_kept():
    run = runs_of(CALM, NOISY, WORST, CALM, CALM)
    kept = list(quiet_runs(run, 3))
    assert [one.engine["pace"] for one in kept] == [CALM, CALM, CALM]
    assert [one.engine["attempts"] for one in kept] == [1, 3, 1]
    assert refusal_of(kept) == ""


def test_after_a_few_repetitions_the_verdict_is_refused():
    run = runs_of(WORST, NOISY, WORST, WORST, NOISY)
    kept = list(quiet_runs(run, 2))
    assert [one.engine["pace"] for one in kept] == [NOISY, NOISY]
    assert sum(one.engine["attempts"] for one in kept) == 2 + MORE_RUNS
    assert refusal_of(kept) == (
        "the machine's pace varied by 34 % (a reference step took 0.98 to 1.31 times its usual time; 25 % is "
        "accepted) and its thread got 100 % of a core (at "
        "least 80 % is needed) between the calibration and the runs"
    )


def test_a_change_between_calibration_and_run_is_noise_too():
    later = {"median": 1.4, "p10": 1.35, "p90": 1.45}
    assert refusal_of([runs_of(later)()]) == ""
    assert "0.98 to 1.45 times" in refusal_of([runs_of(later, calibration=CALM)()])


def test_half_a_core_is_too_little():
    busy = CALM | {"core_share": 0.5}
    kept = list(quiet_runs(runs_of(busy, CALM), 1))
    assert [one.engine["pace"] for one in kept] == [CALM]
    assert "got 50 % of a core" in refusal_of([runs_of(busy)()])


def test_nothing_is_repeated_after_a_noisy_calibration():
    kept = list(quiet_runs(runs_of(CALM, CALM, calibration=WORST), 2))
    assert [one.engine["attempts"] for one in kept] == [1, 1]
    assert refusal_of(kept)


def test_a_gpu_has_no_pace_and_is_never_refused():
    kept = list(quiet_runs(lambda: SimpleNamespace(engine={}), 2))
    assert [one.engine for one in kept] == [{"attempts": 1}] * 2
    assert refusal_of(kept) == ""
    assert Pace(**CALM).median == 1
