"""Samples of points and states over time do not depend on how a run was divided."""

import numpy as np
import pytest

from sim.metrics.series import Points, States, mean_and_max_over_time


def parts_of(rng, size, num_parts):
    return np.array_split(rng.permutation(size), num_parts)


def test_samples_of_parts_are_those_of_the_whole():
    rng = np.random.default_rng(1)
    x, y, number = rng.random(5000), rng.exponential(size=5000), np.arange(5000)
    whole, first, second = Points(300), Points(300), Points(300)
    whole.add(number, x, y)
    for place, rows in enumerate(parts_of(rng, 5000, 7)):
        (first if place % 2 else second).add(number[rows], x[rows], y[rows])
    first.merge(second)
    for mine, theirs in zip(first.drawn(), whole.drawn(), strict=True):
        assert (mine == theirs).all()
    drawn = whole.drawn()[1]
    assert set(np.sort(y)[-30:]) <= set(drawn)
    assert 270 <= len(drawn) <= 300
    others = np.sort(drawn)[:-30]
    assert np.median(others) == pytest.approx(np.median(y), rel=0.25)


def test_few_points_are_all_drawn():
    points = Points(300)
    points.add(np.arange(20), np.arange(20.0), np.arange(20.0))
    points.merge(points)
    assert sorted(points.drawn()[0].tolist()) == np.arange(20.0).tolist()


def test_states_are_exact_means_and_maxima_in_bins_that_grow():
    rng = np.random.default_rng(2)
    gap_s, duration_s = rng.exponential(0.2, 3000), rng.exponential(0.1, 3000)
    duration_s[::500] = 3.0  # longer than several bins
    start_s = np.cumsum(gap_s + duration_s) - duration_s
    value, group = rng.integers(0, 50, 3000).astype(float), np.zeros(3000, np.int64)
    whole, parts = States(1, 1), States(1, 1)
    whole.add(group, start_s, duration_s, [value])
    for rows in (slice(2000, 3000), slice(0, 10), slice(10, 2000)):
        part = States(1, 1)
        part.add(group[rows], start_s[rows], duration_s[rows], [value[rows]])
        parts.merge(part)
    assert parts.log_width == whole.log_width
    assert parts.integrals == pytest.approx(whole.integrals)
    assert (parts.maxima == whole.maxima).all()
    edges_s = np.arange(whole.integrals.shape[2] + 1) * whole.width_s
    mean, highest = mean_and_max_over_time(start_s, duration_s, value, edges_s)
    assert whole.integrals[0, 0] / whole.width_s == pytest.approx(mean, abs=1e-9)
    assert whole.maxima[0, 0] == pytest.approx(highest)
