"""A run is stopped early once its SLO is out of reach, and only then."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.app.settings.hydra_errors import composed
from policies.core.request import Prompt, Request
from sim.cluster.early_stop import MissedSloStop, most_missed, verdicts
from sim.metrics.slo import Slo
from sim.records.requests import RequestLog, Status
from sim.report.wording import caveats
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run, run

SOURCE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
SMALL = ("model=smollm2_135m", "hardware=l4", "workload=poisson", "workload.num_requests=150")


TRAFFIC = build_run(composed(SOURCE, SMALL))[0]


def simulated_run(*, rate=8.0, ttft_ms=500, slots=8, may_stop=True):
    base = TRAFFIC
    scenario = replace(
        base,
        workload=replace(base.workload, arrivals=replace(base.workload.arrivals, rate_per_s=rate)),
        slo=Slo(ttft_ms=ttft_ms, tpot_ms=50),
        engine=replace(base.engine, max_num_seqs=slots),
        sim=replace(base.sim, stop_missed=may_stop),
    )
    return run(scenario, scenario.source())


@given(st.integers(1, 10_000), st.floats(0.01, 1.0))
def test_the_target_is_kept_by_as_many_as_may_miss_and_by_no_more(num_requests, target):
    allowed = most_missed(num_requests, target)
    assert (num_requests - allowed) / num_requests >= target * (1 - 1e-9)
    assert (num_requests - allowed - 1) / num_requests < target


def test_of_fifteen_one_may_miss_ninety_percent():
    assert [most_missed(n, 0.9) for n in (9, 10, 15, 20)] == [0, 1, 1, 2]


@settings(max_examples=8)
@given(st.sampled_from([5, 40, 70, 400]), st.sampled_from([60, 150, 500]))
def test_a_run_that_is_stopped_early_would_have_missed_and_one_that_is_not_is_unchanged(rate, ttft_ms):
    whole = simulated_run(rate=rate, ttft_ms=ttft_ms, may_stop=False)
    stopped = simulated_run(rate=rate, ttft_ms=ttft_ms)
    if stopped.records.missed is None:
        assert stopped.summary["goodput"] == whole.summary["goodput"]
    else:
        found = stopped.records.missed
        really = len(whole.requests) - int(whole.requests["slo_met"].sum())
        assert found.allowed < found.missed <= really
        assert stopped.records.end_s < whole.records.end_s
        assert not whole.summary["goodput"]["attained"]


@pytest.mark.parametrize("rate", [5.0, 40.0, 70.0, 400.0])
def test_counts_that_cannot_stop_a_run_are_left_out_and_change_nothing(rate, monkeypatch):
    num_counts = 0

    def counted(*args):
        nonlocal num_counts
        num_counts += 1
        return verdicts(*args)

    monkeypatch.setattr("sim.cluster.early_stop.verdicts", counted)
    some, num_some, num_counts = simulated_run(rate=rate), num_counts, 0
    monkeypatch.setattr(
        MissedSloStop, "_num_missed", lambda stop: counted(stop._requests, stop._slo, stop._clock.now).missed
    )
    assert simulated_run(rate=rate).records.missed == some.records.missed
    assert num_some < num_counts / 2 if some.records.missed is None else num_some <= num_counts


def test_what_is_certain_to_miss_is_counted_and_nothing_else():
    log = RequestLog()
    waits_a_little, late, slow, good, goes_on = range(1, 6)  # 0 waits too long
    for request_id in range(6):
        log.arrive(Request(request_id, 9.8 if request_id == waits_a_little else 0.0, Prompt(4)))
    for request_id, times_s in {
        late: [0.6],
        slow: [0.1] + [2.1] * 10,
        good: [0.1] + [1.1] * 10,
        goes_on: [0.1] + [9.0] * 2,
    }.items():
        log.first_token(request_id, times_s[0])
        for time_s in times_s[1:]:
            log.next_token(request_id, time_s)
    for request_id in (slow, good):
        log.status[request_id] = Status.finished
    assert verdicts(log, Slo(ttft_ms=500, tpot_ms=150), 10.0) == (3, 1)
    assert verdicts(log, Slo(ttft_ms=500, tpot_ms=150, e2e_ms=5000), 10.0) == (4, 1)


def test_an_early_stop_is_reported():
    result = simulated_run(rate=4000.0, slots=1)
    found = caveats(result.summary)
    assert found[0].startswith("Stopped early at")
    assert "had missed the SLO" in found[0]
    assert "still running or waiting at the early end" in found[1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["slo=none"], "^sim.stop_missed=true, slo=none: needs an SLO"),
        (["metrics.warmup_s=5"], "^sim.stop_missed=true, metrics.warmup_s=5.0: all requests are counted"),
        (["metrics.cooldown_s=2"], "^sim.stop_missed=true, metrics.cooldown_s=2.0: all requests are counted"),
    ],
)
def test_rejects_what_it_cannot_count(overrides, message):
    with pytest.raises(ConfigError, match=message):
        build_run(composed(SOURCE, [*SMALL, "sim.stop_missed=true", *overrides]))
