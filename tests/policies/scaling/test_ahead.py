"""Autoscalers that look ahead: the schedule, the forecast."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.scaling.predictive import HoltWinters, Predictive, SeasonalNaive
from policies.scaling.scheduled import Scheduled

DAY = ({"at": "06:00", "replicas": 4}, {"at": "18:30", "replicas": 6}, {"at": "22:00", "replicas": 2})


def forecasters(season):
    return [
        SeasonalNaive(season),
        HoltWinters(season, alpha=0.4, beta=0.2, gamma=0.3),
    ]


@given(
    season=st.lists(st.integers(0, 100), min_size=2, max_size=12),
    slope=st.integers(-3, 3),
    num_seen=st.integers(0, 40),
    num_ahead=st.integers(1, 30),
)
def test_a_forecast_is_exact_for_a_periodic_series_with_a_trend(season, slope, num_seen, num_ahead):
    """After two seasons, any number of values, any number ahead."""
    num_seen += 2 * len(season)
    places = np.arange(num_seen + num_ahead)
    series = np.array(season)[places % len(season)] + slope * places
    for forecaster in forecasters(len(season)):
        for value in series[:num_seen]:
            forecaster.observe(float(value))
        assert forecaster.forecast(num_ahead) == pytest.approx(series[num_seen:], abs=1e-6)


def test_before_one_season_the_last_value_and_before_two_the_last_season():
    for forecaster in forecasters(3):
        assert forecaster.forecast(2).tolist() == [0, 0]
        for value in (1.0, 5.0):
            forecaster.observe(value)
        assert forecaster.forecast(2).tolist() == [5, 5]
        for value in (3.0, 2.0):
            forecaster.observe(value)
        assert forecaster.forecast(4).tolist() == [5, 3, 2, 5]


def test_holt_winters_follows_a_step_faster_with_a_larger_alpha():
    def level_after_step(alpha):
        forecaster = HoltWinters(4, alpha=alpha, beta=0.01, gamma=0.01)
        for value in [10.0] * 8 + [20.0] * 6:
            forecaster.observe(value)
        return forecaster.forecast(1)[0]

    assert 10 < level_after_step(0.1) < level_after_step(0.5) < 21


def test_the_schedule_holds_from_its_times_and_the_last_entry_over_night(make_pool):
    policy = Scheduled(entries=DAY)
    hours = {0: 2, 5.99: 2, 6: 4, 18.49: 4, 18.5: 6, 22: 2, 24: 2, 30: 4, 48 + 18.5: 6}
    assert {h: policy.target(make_pool(1), 3600 * h) for h in hours} == hours


def test_replicas_are_asked_for_earlier_and_let_go_on_time(make_pool):
    policy = Scheduled(entries=DAY, lead_s=600)
    minutes = {349: 2, 350: 4, 1099: 4, 1100: 6, 1319: 6, 1320: 2, 1440 + 350: 4}
    assert {m: policy.target(make_pool(1), 60 * m) for m in minutes} == minutes


def test_without_a_lead_of_their_own_they_look_as_far_ahead_as_a_replica_takes_to_start(make_pool):
    """600 s before 06:00 and 18:30; and a forecast of 2 x 60 s, which reaches the rise 3 intervals ahead."""
    policy = Scheduled(entries=DAY, lead_s=None)
    minutes = {349: 2, 350: 4, 1099: 4, 1100: 6, 1320: 2}
    assert {m: policy.target(make_pool(1, cold_start_s=600), 60 * m) for m in minutes} == minutes
    given, derived = make_predictive(lead_s=120), make_predictive(lead_s=None)
    slow = partial(make_pool, cold_start_s=120)
    assert ask_through(derived, SEASON * 3, slow) == ask_through(given, SEASON * 3, make_pool)
    at_once = ask_through(make_predictive(lead_s=None), SEASON * 3, make_pool)
    assert at_once[20:] == [2, 2, 2, 6, 6, 6, 2, 2, 2, 2]


def test_a_compressed_day_keeps_its_clock_and_a_run_may_begin_at_noon(make_pool):
    policy = Scheduled(entries=DAY, day_s=2400, offset_s=1200)
    seconds = {0: 4, 649: 4, 650: 6, 999: 6, 1000: 2, 1799: 2, 1800: 4}
    assert {s: policy.target(make_pool(1), s) for s in seconds} == seconds


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "entries=\\[\\]: must have an entry"),
        ([{"at": "24:00", "replicas": 1}], "entries\\[0\\].at=24:00: must be a time from '00:00' to '23:59'"),
        ([{"at": 480, "replicas": 1}], "entries\\[0\\].at=480: must be a time"),
        ([{"at": "08:00", "replicas": 9}], "replicas=9: must be a whole number from min_replicas=1 to max_r"),
        ([*DAY, {"at": "07:00", "replicas": 2}], "entries\\[3\\].at=07:00: must be later than the entry"),
        ([{"at": "08:00"}], "must have the keys at and replicas"),
    ],
)
def test_rejects_a_schedule_that_cannot_be_read(entries, message):
    with pytest.raises(ValueError, match=message):
        Scheduled(entries=tuple(entries))


def ask_through(policy, rates_per_s, make_pool, share_met=1.0):
    """Targets of a policy that sees these rates, one an interval; every request ends at once."""
    num_arrived, targets = 0, []
    for index, rate_per_s in enumerate(rates_per_s):
        num_arrived += round(rate_per_s * policy.interval_s)
        pool = make_pool(
            targets[-1] if targets else 1,
            num_arrivals=num_arrived,
            num_arrived_tokens=100 * num_arrived,
            num_ended=num_arrived,
            num_met=round(share_met * num_arrived),
        )
        targets.append(policy.target(pool, (index + 1) * policy.interval_s))
    return targets


def make_predictive(**changed):
    plain = {"interval_s": 60, "season_s": 600, "lead_s": 120, "capacity_per_s": 1.0, "target_share": 0.5}
    return Predictive(**{**plain, "learn": False, "stabilisation_s": 0, **changed})


SEASON = [1, 1, 1, 1, 3, 3, 1, 1, 1, 1]


@pytest.mark.parametrize("method", ["seasonal_naive", "holt_winters"])
def test_on_the_second_day_replicas_are_asked_for_before_the_rise(method, make_pool):
    """1/s needs 2 replicas at half of 1/s each, 3/s needs 6; it looks at the next 120 s, 3 intervals.

    On the first day the rise (intervals 4, 5) is answered when it is there; on later days 3 intervals ahead.
    """
    targets = ask_through(make_predictive(method=method), SEASON * 3, make_pool)
    assert targets[:10] == [2, 2, 2, 2, 6, 6, 2, 2, 2, 2]
    assert targets[20:] == [2, 6, 6, 6, 6, 6, 2, 2, 2, 2]


def test_tokens_may_be_counted_instead_of_requests(make_pool):
    policy = make_predictive(count="tokens", capacity_per_s=100.0)
    assert ask_through(policy, [1, 3], make_pool) == [2, 6]


def test_capacity_is_learnt_from_what_was_sustained_within_the_slo(make_pool):
    """4/s on 8 replicas at half of 0.25/s each; 0.5/s each was sustained three times, so 8 become... 8.

    With 8 as the most, 8/s on 8 replicas are 1/s each: from then on 4/s need 8 only if half of 1/s is less
    than 0.5/s each, and 3/s need 6.
    """
    policy = make_predictive(capacity_per_s=0.25, learn=True)
    targets = ask_through(policy, [8, 8, 8, 8, 3, 3], make_pool)
    assert targets == [8, 8, 8, 8, 6, 6]
    missed = make_predictive(capacity_per_s=0.25, learn=True)
    assert ask_through(missed, [8, 8, 8, 8, 3, 3], make_pool, share_met=0.1) == [8] * 6


def test_replicas_that_have_just_gone_did_their_part(make_pool):
    """8/s by 8, 8, 4 and 2 replicas, which go at the end of an interval: 1, 1 and 2/s each, not 2, 4 and 8.

    The least of the last three is 1/s, of which half is made use of: 4/s want 8.
    """
    policy = make_predictive(capacity_per_s=0.25, learn=True)
    for index, num_replicas in enumerate((8, 4, 2, 1)):
        num = 480 * (index + 1)
        pool = make_pool(num_replicas, num_arrivals=num, num_ended=num, num_met=num)
        policy.target(pool, 60 * (index + 1))
    assert policy.target(make_pool(8, num_arrivals=1920 + 240, num_ended=1920, num_met=1920), 300) == 8


def test_what_two_askings_saw_is_not_sustained(make_pool):
    policy = make_predictive(capacity_per_s=0.25, learn=True)
    assert ask_through(policy, [0, 8, 8, 1, 1, 1], make_pool)[-1] == 8


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"season_s": 90}, "season_s=90: must be a whole number of intervals, interval_s=60 s"),
        ({"method": "arima"}, "method=arima: must be one of seasonal_naive, holt_winters"),
        ({"count": "words"}, "count=words: must be one of requests, tokens"),
        (
            {"count": "tokens", "learn": True},
            "learn=True, count=tokens: the capacity can only be learnt in requests",
        ),
        ({"capacity_per_s": 0}, "capacity_per_s=0: must be a finite number > 0"),
        ({"alpha": 1.5}, "alpha=1.5: must be a share"),
        ({"lead_s": -1}, "lead_s=-1: must be a finite number > 0 s"),
    ],
)
def test_rejects_a_forecast_that_cannot_be_made(changed, message):
    with pytest.raises(ValueError, match=message):
        make_predictive(**changed)
