"""Series of plots: exact means over time, maxima that hide no spike, tails that stay visible."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.metrics.definitions import Window, measured_window
from sim.metrics.series import Bins, cdf_points, mean_and_max_over_time, octaves

# busy times of a replica: (idle before, duration, value)
spans = st.lists(st.tuples(st.floats(0, 2), st.floats(0.01, 3), st.integers(0, 100)), min_size=1, max_size=12)


def intervals(pieces):
    idle, duration, value = (np.array(column, dtype=np.float64) for column in zip(*pieces, strict=True))
    return np.cumsum(idle + duration) - duration, duration, value


def test_mean_and_max_of_a_curve_drawn_on_paper():
    """2 for a second, idle for a second, 6 for two seconds; buckets of 2 s."""
    mean, highest = mean_and_max_over_time(
        np.array([0.0, 2.0]), np.array([1.0, 2.0]), np.array([2.0, 6.0]), np.array([0.0, 2.0, 4.0, 6.0])
    )
    assert mean.tolist() == [1.0, 6.0, 0.0]
    assert highest.tolist() == [2.0, 6.0, 0.0]


@given(spans, st.integers(1, 20))
def test_means_over_time_keep_the_integral_and_maxima_the_highest_value(pieces, num_buckets):
    start, duration, value = intervals(pieces)
    edges = np.linspace(0, start[-1] + duration[-1], num_buckets + 1)
    mean, highest = mean_and_max_over_time(start, duration, value, edges)
    assert np.dot(mean, np.diff(edges)) == pytest.approx(np.dot(value, duration), abs=1e-6)
    assert highest.max() == value.max()
    assert (mean <= highest + 1e-6).all()


def test_a_replica_that_never_ran_is_a_line_at_zero():
    none = np.zeros(0)
    mean, highest = mean_and_max_over_time(none, none, none, np.array([0.0, 1.0, 2.0]))
    assert mean.tolist() == highest.tolist() == [0.0, 0.0]


def test_rates_count_each_event_as_often_as_it_happened():
    bins = Bins()
    bins.count("events", np.array([0.5, 3.0, np.nan]), np.array([4, 1, 7]))
    middle_s, counts = bins.buckets(["events"], 4.0, 2)
    assert counts["events"].tolist() == [4, 1, 0]  # the last begins with the end
    assert middle_s.tolist() == [1.0, 3.0, 5.0]


def test_few_values_are_drawn_without_loss():
    values, share = cdf_points(np.array([3.0, np.nan, 1.0]), np.array([1, 5, 3]))
    assert values.tolist() == [1.0, 3.0]
    assert share.tolist() == [0.75, 1.0]


def test_many_values_keep_their_shape_and_the_far_tail():
    values = np.arange(1.0, 100_001.0)
    x, share = cdf_points(values, max_points=600)
    assert 300 < len(x) <= 602
    assert share == pytest.approx(x / 100_000)
    assert (x[0], x[-1]) == (1, 100_000)
    assert ((share > 0.999) & (share < 1)).sum() > 20  # the slowest thousandth still has a curve


def test_nothing_has_no_distribution():
    x, share = cdf_points(np.array([np.nan]))
    assert len(x) == len(share) == 0


def test_octaves_of_lengths():
    lower, index = octaves(np.array([1, 2, 3, 1024, 2047]))
    assert lower.tolist() == [1, 2, 1024]
    assert index.tolist() == [0, 1, 1, 2, 2]


@given(spans, st.floats(0, 10), st.floats(0, 10))
def test_overlap_with_a_window_is_never_negative_and_adds_up(pieces, a, b):
    start, duration, _ = intervals(pieces)
    low, high = sorted((a, b))
    end = start[-1] + duration[-1]
    parts = [Window(0.0, low), Window(low, high), Window(high, max(end, high))]
    inside = [part.overlap_s(start, duration) for part in parts]
    assert min(part.min() for part in inside) >= 0
    assert np.sum(inside, axis=0) == pytest.approx(duration, abs=1e-9)


def test_a_window_holds_both_its_ends_and_nothing_that_never_happened():
    held = Window(1.0, 2.0).holds(np.array([0.9, 1.0, 2.0, 2.1, np.nan]))
    assert held.tolist() == [False, True, True, False, False]


def test_trimming_more_than_the_run_leaves_an_empty_window():
    assert measured_window(10.0, warmup_s=20.0) == (10.0, 10.0)
    assert measured_window(10.0, warmup_s=4.0, cooldown_s=8.0) == (10.0, 10.0)
