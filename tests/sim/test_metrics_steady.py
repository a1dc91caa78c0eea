"""Warm-up and intervals of one run, against series whose steady state is known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.metrics.steady import GROUP, interval, percentile, warm_up


def ar1(rng, num_values, memory, start=0.0):
    """x_i = memory x_{i-1} + noise: mean 0, variance 1 in the steady state, begun at `start`."""
    noise = rng.normal(size=num_values) * np.sqrt(1 - memory**2)
    values, last = np.empty(num_values), start
    for i in range(num_values):
        last = values[i] = memory * last + noise[i]
    return values


def brute_force_cut(values):
    groups = values[: len(values) // GROUP * GROUP].reshape(-1, GROUP).mean(axis=1)
    n = len(groups)
    spreads = [((groups[d:] - groups[d:].mean()) ** 2).sum() / (n - d) ** 2 for d in range(n // 2 + 1)]
    return GROUP * int(np.argmin(spreads))


@given(st.integers(0, 2**32 - 1), st.integers(100, 400), st.floats(-20, 20))
def test_the_cut_is_the_minimum_of_the_formula(seed, num_values, start):
    values = ar1(np.random.default_rng(seed), num_values, 0.9, start)
    assert warm_up(values).num_values == brute_force_cut(values)


def test_a_transient_is_cut_where_it_has_decayed():
    """From 20 with memory 0.99 it is below the noise after some 300 values."""
    cuts = [warm_up(ar1(np.random.default_rng(seed), 5000, 0.99, 20.0)) for seed in range(20)]
    assert all(cut.is_settled for cut in cuts)
    assert 150 < np.median([cut.num_values for cut in cuts]) < 800


def test_a_queue_that_grows_for_ever_never_settles():
    assert not warm_up(np.arange(1000.0)).is_settled


def test_few_values_are_never_settled_and_equal_ones_have_no_warm_up():
    assert warm_up(np.ones(99)) == (0, False)
    assert warm_up(np.ones(100)) == (0, True)


def test_values_that_do_not_exist_are_left_out_of_the_averages():
    values = ar1(np.random.default_rng(0), 1000, 0.5, 30.0)
    with_gaps = values.copy()
    with_gaps[100:105] = np.nan
    with_gaps[7] = np.nan
    assert abs(warm_up(with_gaps).num_values - warm_up(values).num_values) <= 2 * GROUP
    assert warm_up(np.full(1000, np.nan)) == (0, False)


@pytest.mark.parametrize(
    ("figure", "truth"), [(np.mean, 0.0), (percentile(50), 0.0), (percentile(90), 1.2816)]
)
def test_intervals_of_a_run_with_memory_hold_the_truth_as_often_as_they_say(figure, truth):
    """95 %, less what is left of the memory; an interval that ignored it would hold it in some 35 %."""
    found = [interval(ar1(np.random.default_rng(seed), 6000, 0.9), figure) for seed in range(300)]
    held = np.mean([one.low <= truth <= one.high for one in found])
    assert 0.90 <= held <= 0.99


def test_an_interval_of_batch_means_by_hand():
    """Eight batches of ten equal values: means 1 to 8 shuffled, s = 2.449, t(7) = 2.365."""
    values = np.repeat([3.0, 7.0, 1.0, 5.0, 8.0, 2.0, 6.0, 4.0], 10)
    found = interval(values)
    assert found.mean == 4.5
    assert found.num_values == 8
    assert found.high - found.mean == pytest.approx(2.3646 * 2.4495 / np.sqrt(8), rel=1e-4)


def test_a_run_that_is_too_short_or_drifts_has_no_interval():
    assert np.isnan(interval(np.random.default_rng(0).normal(size=79)).low)
    assert np.isnan(interval(np.arange(1000.0)).low)
    assert interval(np.full(100, np.nan)).num_values == 0


def test_equal_values_leave_nothing_to_be_uncertain_about():
    assert interval(np.full(50, 3.0)) == (3.0, 3.0, 3.0, 50)
