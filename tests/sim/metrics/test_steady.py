"""Warm-up and intervals of one run, against series whose steady state is known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtri

from sim.metrics.steady import (
    GROUP,
    MEAN,
    MIN_BATCHES,
    MIN_INDEPENDENT,
    NORMAL_5_PERCENT,
    Lack,
    Series,
    percentile,
    warm_up,
)


def interval(values, figure=MEAN):
    return Series(values).interval(figure)


def ar1(rng, num_values, memory, start=0.0):
    """Draws x_i = memory x_{i-1} + noise: mean 0, variance 1 in the steady state, begun at `start`."""
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


def test_independent_values_are_rarely_called_unsettled_and_little_is_cut():
    found = [warm_up(np.random.default_rng(seed).exponential(size=2000)) for seed in range(200)]
    assert np.mean([one.is_settled for one in found]) > 0.93
    assert np.median([one.num_values for one in found]) < 200


@given(st.integers(0, 2**32 - 1), st.integers(0, 600), st.floats(0.01, 100))
def test_no_more_than_half_is_cut_and_units_do_not_matter(seed, num_values, unit):
    values = np.random.default_rng(seed).integers(0, 64, num_values).astype(float)
    found = warm_up(values)
    assert found.num_values <= num_values / 2
    assert found.num_values % GROUP == 0
    # Powers of two keep every bit, so that ties are decided alike.
    factor = 2.0 ** round(np.log2(unit))
    assert warm_up(factor * values) == found


def test_a_queue_that_grows_for_ever_never_settles():
    assert not warm_up(np.arange(1000.0)).is_settled


def test_few_values_are_never_settled_and_equal_ones_have_no_warm_up():
    assert warm_up(np.ones(99)) == (0, False)
    assert warm_up(np.ones(100)) == (0, True)


def test_a_series_that_ends_before_the_cut_never_settles():
    """A queue that only a tenth of the requests have left: after the cut, no wait is known."""
    waits = np.full(1000, np.nan)
    waits[:100] = np.arange(100.0)
    assert not warm_up(waits).is_settled
    waits[:] = np.arange(1000.0) % 7
    assert warm_up(waits).is_settled


def test_values_that_do_not_exist_are_left_out_of_the_averages():
    values = ar1(np.random.default_rng(0), 1000, 0.5, 30.0)
    with_gaps = values.copy()
    with_gaps[100:105] = np.nan
    with_gaps[7] = np.nan
    assert abs(warm_up(with_gaps).num_values - warm_up(values).num_values) <= 2 * GROUP
    assert warm_up(np.full(1000, np.nan)) == (0, False)


@pytest.mark.parametrize(("figure", "truth"), [(MEAN, 0.0), (percentile(50), 0.0), (percentile(90), 1.2816)])
def test_intervals_of_a_run_with_memory_hold_the_truth_as_often_as_they_say(figure, truth):
    """95 %, less what is left of the memory; an interval that ignored it would hold it in some 35 %."""
    found = [interval(ar1(np.random.default_rng(seed), 6000, 0.9), figure) for seed in range(300)]
    held = np.mean([one.low <= truth <= one.high for one in found])
    assert 0.90 <= held <= 0.99


def test_an_interval_of_batch_means_by_hand():
    """Sixteen batches of ten, means 1 to 16 shuffled: s = 4.761, t(15) = 2.131; with alternating noise."""
    means = np.array([9.0, 4, 14, 1, 11, 6, 16, 3, 8, 13, 2, 15, 5, 10, 7, 12])
    # Noise that neighbours contradict leaves no memory: 160 values tell as much as 160.
    values = np.repeat(means, 10) + np.tile([100.0, -100.0], 80)
    found = interval(values)
    assert found.value == pytest.approx(8.5)
    assert found.num_batches == 16
    widened = np.sqrt(1 + 2 * MIN_INDEPENDENT / 160)
    assert found.high - found.value == pytest.approx(2.1314 * 4.7610 / 4 * widened, rel=1e-4)
    assert found.value - found.low == pytest.approx(found.high - found.value)


def test_bounds_of_a_percentile_are_quantiles_and_need_values_beyond_them():
    """Exponential ones: the bounds of p99 have shares about 0.99 on both sides."""
    values = np.random.default_rng(0).exponential(size=8000)
    found = interval(values, percentile(99))
    below, above = (np.mean(values <= bound) for bound in (found.low, found.high))
    assert 0.99 - below == pytest.approx(above - 0.99, abs=2 / 8000)
    assert found.high - found.value > found.value - found.low > 0


def test_few_values_that_remember_long_have_no_interval():
    """With memory 0.99 a value is worth 1 / 199: 4,000 tell no more than 20, 40,000 no more than 200."""
    short = [interval(ar1(np.random.default_rng(seed), 4000, 0.99)).lack for seed in range(20)]
    assert short.count(Lack.DEPENDENT) >= 19
    long = [ar1(np.random.default_rng(seed), 40_000, 0.99) for seed in range(10)]
    assert sum(interval(values).lack is None for values in long) >= 9
    # Of p99 they would have to tell 300.
    assert sum(interval(values, percentile(99)).lack is Lack.SHORT for values in long) >= 8


def waits_in_queue(seed, num_values, load):
    """Draws the waits of an M/M/1 queue that begins idle, by Lindley's recursion.

    W_{i+1} = max(0, W_i + service - gap), with services of mean 1 s.
    """
    rng = np.random.default_rng(seed)
    steps = rng.exponential(size=num_values) - rng.exponential(1 / load, size=num_values)
    walk = np.cumsum(steps)
    return walk - np.minimum(np.minimum.accumulate(walk), 0.0)


def test_intervals_of_a_queue_hold_its_mean_wait():
    """W = load / (1 - load) = 1 for M/M/1 at half load; a wait resembles the one before."""
    found = [interval(waits_in_queue(seed, 20_000, 0.5)) for seed in range(200)]
    known = [one for one in found if one.lack is None]
    assert len(known) > 180
    assert 0.90 <= np.mean([one.low <= 1.0 <= one.high for one in known]) <= 0.99
    alone = [1.96 * waits_in_queue(seed, 20_000, 0.5).std() / np.sqrt(20_000) for seed in range(200)]
    assert np.mean([abs(one.value - 1.0) <= half for one, half in zip(found, alone, strict=True)]) < 0.7


@pytest.mark.parametrize(
    ("load", "num_values", "least_known"), [(0.5, 10_000, 0.75), (0.8, 50_000, 0.3), (0.8, 10_000, 0.0)]
)
def test_intervals_of_the_tail_of_a_queue_hold_it_or_are_not_reported(load, num_values, least_known):
    """P(W > t) = load exp(-(1 - load) t). 32 batches' percentiles gave all intervals, and held 57 to 77 %."""
    truth = np.log(load / 0.01) / (1 - load)
    found = [interval(waits_in_queue(seed, num_values, load), percentile(99)) for seed in range(100)]
    known = [one for one in found if one.lack is None]
    assert len(known) >= least_known * len(found)
    if least_known:
        assert np.mean([one.low <= truth <= one.high for one in known]) >= 0.85
    else:
        assert len(known) <= 0.03 * len(found)


def test_the_tail_of_independent_values_is_held():
    """p99 of exponential values is ln 100."""
    found = [interval(np.random.default_rng(s).exponential(size=8000), percentile(99)) for s in range(200)]
    assert 0.90 <= np.mean([one.low <= np.log(100) <= one.high for one in found]) <= 0.995


@given(st.integers(0, 2**32 - 1), st.integers(0, 2000), st.sampled_from([50, 90, 99]))
def test_an_interval_holds_its_figure_or_says_why_there_is_none(seed, num_values, q):
    values = np.random.default_rng(seed).gamma(2.0, size=num_values)
    for figure, whole in ((MEAN, np.mean), (percentile(q), lambda v: np.percentile(v, q))):
        found = interval(values, figure)
        if not num_values:
            assert found.lack is Lack.NO_VALUES
            continue
        assert found.value == pytest.approx(whole(values))
        if num_values < MIN_BATCHES * figure.min_per_batch:
            assert found.lack is Lack.SHORT
        if found.lack is None:
            assert found.low <= found.value <= found.high
            assert found.num_batches >= MIN_BATCHES
            assert num_values >= found.num_batches * figure.min_per_batch
        else:
            assert np.isnan([found.low, found.high]).all()


def test_a_run_that_is_too_short_or_drifts_has_no_interval():
    assert interval(np.random.default_rng(0).normal(size=79)).lack is Lack.SHORT
    assert interval(np.arange(1000.0)).lack is Lack.DEPENDENT
    assert interval(np.full(100, np.nan)).lack is Lack.NO_VALUES
    assert percentile(99).min_per_batch == 100
    assert interval(np.random.default_rng(0).normal(size=799), percentile(99)).lack is Lack.SHORT


def test_equal_values_leave_nothing_to_be_uncertain_about():
    found = interval(np.full(100, 3.0))
    assert (found.low, found.value, found.high) == (3.0, 3.0, 3.0)


def test_the_quantile_of_the_test_for_independence_is_that_of_the_normal_distribution():
    assert float(ndtri(0.05)) == NORMAL_5_PERCENT
