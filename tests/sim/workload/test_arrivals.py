"""Arrival processes: rates and burstiness within confidence intervals, limits kept, order kept."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sim.workload.arrivals import AllAtOnce, Constant, Diurnal, Gamma, OnOff, PerMinute, Poisson
from sim.workload.distributions import stream

RANDOM = [
    Poisson(rate_per_s=5.0),
    Gamma(rate_per_s=5.0, cv=3.0),
    OnOff(rate_on_per_s=20.0, rate_off_per_s=0.0, on_s=3.0, off_s=7.0),
    Diurnal(mean_rate_per_s=5.0, peak_to_trough_ratio=9.0, period_s=100.0),
    PerMinute(requests_per_minute=(60, 0, 600)),
]
by_name = pytest.mark.parametrize("process", RANDOM, ids=lambda process: type(process).__name__)


def times_of(process, *, seed=0, num_requests=None, duration_s=None):
    return process.times_s(stream(seed, "arrivals"), num_requests=num_requests, duration_s=duration_s)


def assert_count_is_poisson(count, expected):
    """Checks that a Poisson count lies in the central 99% of its distribution."""
    low, high = stats.poisson.interval(0.99, expected)
    assert low <= count <= high, f"{count}, expected {expected:.0f} in [{low:.0f}, {high:.0f}]"


@by_name
def test_times_are_sorted_and_keep_both_limits(process):
    times_s = times_of(process, num_requests=9000, duration_s=1000.0)
    assert (np.diff(times_s) >= 0).all()
    assert times_s[0] >= 0
    assert times_s[-1] < 1000.0
    assert len(times_of(process, num_requests=9000)) == 9000


@by_name
def test_the_first_times_do_not_depend_on_how_many_are_asked_for(process):
    many = times_of(process, num_requests=9000)
    assert times_of(process, num_requests=10).tobytes() == many[:10].tobytes()
    in_time = times_of(process, duration_s=200.0)
    assert in_time.tobytes() == many[: len(in_time)].tobytes()


@by_name
def test_a_seed_names_the_times(process):
    assert times_of(process, num_requests=50).tobytes() == times_of(process, num_requests=50).tobytes()
    assert (
        times_of(process, seed=1, num_requests=50).tobytes() != times_of(process, num_requests=50).tobytes()
    )


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0])
def test_gamma_gaps_have_the_rate_and_cv_asked_for(cv):
    gaps_s = np.diff(times_of(Gamma(rate_per_s=4.0, cv=cv), num_requests=100_000))
    half_width = 2.576 * stats.sem(gaps_s)
    assert half_width < 0.02 * 0.25
    assert abs(gaps_s.mean() - 0.25) <= half_width
    assert stats.kstest(gaps_s, stats.gamma(cv**-2, scale=cv**2 / 4.0).cdf).pvalue > 0.01


def test_poisson_gaps_are_exponential():
    gaps_s = np.diff(times_of(Poisson(rate_per_s=4.0), num_requests=20_000))
    assert stats.kstest(gaps_s, stats.expon(scale=0.25).cdf).pvalue > 0.01


def test_constant_is_a_metronome_from_zero():
    assert times_of(Constant(rate_per_s=4.0), num_requests=3).tolist() == [0.0, 0.25, 0.5]
    assert times_of(Constant(rate_per_s=4.0), duration_s=0.5).tolist() == [0.0, 0.25]
    assert times_of(Constant(rate_per_s=4.0), num_requests=1, duration_s=9.0).tolist() == [0.0]


def test_all_at_once_is_at_zero_and_needs_a_number():
    assert times_of(AllAtOnce(), num_requests=3).tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="num_requests=null: must be set, because"):
        times_of(AllAtOnce(), duration_s=5.0)


def test_on_off_has_its_two_rates_and_nothing_in_a_silent_phase():
    times_s = times_of(OnOff(rate_on_per_s=20.0, rate_off_per_s=0.0, on_s=3.0, off_s=7.0), duration_s=5000.0)
    assert (times_s % 10 <= 3.0 + 1e-9).all()
    assert_count_is_poisson(len(times_s), 20.0 * 3.0 * 500)
    both = times_of(OnOff(rate_on_per_s=8.0, rate_off_per_s=2.0, on_s=5.0, off_s=5.0), duration_s=5000.0)
    assert_count_is_poisson(np.count_nonzero(both % 10 >= 5), 2.0 * 2500)


def test_per_minute_replays_each_minute_and_repeats():
    process = PerMinute(requests_per_minute=(600, 60, 3000), rate_scale=2.0)
    per_minute = np.bincount((times_of(process, duration_s=360.0) // 60).astype(int), minlength=6)
    for count, expected in zip(per_minute, [1200, 120, 6000] * 2, strict=True):
        assert_count_is_poisson(count, expected)


def test_diurnal_swings_from_trough_to_peak_with_the_ratio_asked_for():
    process = Diurnal(mean_rate_per_s=50.0, peak_to_trough_ratio=4.0, period_s=1000.0)
    phase = times_of(process, duration_s=4000.0) % 1000.0 / 1000.0
    assert_count_is_poisson(len(phase), 50.0 * 4000)

    def expected(low, high):
        """Integrates mean * (1 - a cos(2 pi x)) over a share of the four periods, with a = 3/5."""
        area = (high - low) - 0.6 * (np.sin(2 * np.pi * high) - np.sin(2 * np.pi * low)) / (2 * np.pi)
        return 50.0 * 4000 * area

    for low in np.arange(0, 1, 0.125):
        assert_count_is_poisson(
            np.count_nonzero((phase >= low) & (phase < low + 0.125)), expected(low, low + 0.125)
        )


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=5), st.integers(0, 99))
def test_per_minute_arrivals_fall_only_into_minutes_with_a_rate(counts, seed):
    if sum(counts) < 1:
        counts[0] = 10.0
    times_s = times_of(PerMinute(requests_per_minute=counts), seed=seed, num_requests=200)
    assert (np.diff(times_s) >= 0).all()
    rates = np.array(counts)
    middle = times_s % 60
    inside = (middle > 1e-3) & (middle < 60 - 1e-3)  # at the very edge rounding may choose either minute
    assert (rates[(times_s[inside] // 60).astype(int) % len(counts)] > 0).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Poisson(rate_per_s=0), "rate_per_s=0: must be finite and > 0 requests/s"),
        (lambda: Poisson(rate_per_s=float("inf")), "rate_per_s=inf: must be finite"),
        (lambda: Gamma(rate_per_s=1, cv=-1), "cv=-1: must be finite and > 0"),
        (lambda: Constant(rate_per_s=float("nan")), "rate_per_s=nan: must be finite"),
        (
            lambda: OnOff(rate_on_per_s=1, rate_off_per_s=-1, on_s=1, off_s=1),
            "rate_off_per_s=-1: must be finite",
        ),
        (
            lambda: OnOff(rate_on_per_s=1, rate_off_per_s=1, on_s=0, off_s=1),
            "on_s=0: must be finite and > 0 s",
        ),
        (lambda: Diurnal(mean_rate_per_s=1, peak_to_trough_ratio=0.5), "peak_to_trough_ratio=0.5: must be"),
        (lambda: PerMinute(requests_per_minute=()), r"requests_per_minute=\[\]: must be"),
        (lambda: PerMinute(requests_per_minute=(0, 0)), "not all 0"),
        (lambda: PerMinute(requests_per_minute=(1, -2)), "must be finite, >= 0"),
    ],
)
def test_rejects_settings_that_describe_no_process(make, message):
    with pytest.raises(ValueError, match=message):
        make()
