import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.metrics.series import MAX_BINS, Bins
from sim.metrics.sketches import (
    MAX_GROUPS,
    Distributions,
    GroupedSeries,
    IdGroups,
    MetSeries,
    Sketch,
    means_of_batches,
)
from sim.metrics.steady import MEAN, Lack, Series, interval_of, percentile, share_interval

parts_of_ids = st.lists(st.lists(st.integers(0, 60_000), unique=True, max_size=30), min_size=1, max_size=5)


def values_of(ids):
    return (ids % 97 + 1) * 0.013


@given(parts_of_ids, st.data())
def test_groups_are_the_same_in_any_order(parts, data):
    found = []
    for order in (parts, data.draw(st.permutations(parts))):
        groups, distributions = IdGroups(), Distributions()
        for part in order:
            ids = np.array(sorted(part), np.int64)
            own, counts = IdGroups(), Distributions()
            own.add(ids, values_of(ids))
            counts.add(ids, values_of(ids))
            groups.merge(pickle.loads(pickle.dumps(own)))
            distributions.merge(pickle.loads(pickle.dumps(counts)))
        found.append((groups, distributions))
    (one, counts), (other, others) = found
    assert one.log_width == other.log_width
    assert one.counts.tolist() == other.counts.tolist()
    assert one.units.tolist() == other.units.tolist()
    assert counts.counts.tolist() == others.counts.tolist()
    assert counts.counts.sum() == one.counts.sum() == sum(map(len, parts))


def test_groups_grow_so_that_there_are_not_too_many():
    groups = IdGroups()
    for first in (0, 10_000):
        ids = np.arange(first, first + 10_000)
        groups.add(ids, np.ones(10_000))
    assert groups.log_width == 3  # 20,000 ids in groups of 8
    assert len(groups.counts) == 2500 <= MAX_GROUPS
    means, counts = groups.means
    assert set(means) == {1.0}
    assert set(counts) == {8}


def test_batches_have_about_equally_many_values():
    sizes = np.array([1, 1, 8, 1, 1, 8, 1, 1, 8, 1, 1, 8])
    means = np.arange(12.0)
    # 40 values: a batch ends with the group that reaches 13.3 and 26.7 of them.
    expected = [(0 + 1 + 16 + 3 + 4 + 40) / 20, (6 + 7 + 64) / 10, (9 + 10 + 88) / 10]
    assert means_of_batches(means, sizes, 3) == pytest.approx(expected)
    assert means_of_batches(means, sizes, 4) is None


def autocorrelated(num, seed):
    rng = np.random.default_rng(seed)
    noise, values = rng.exponential(1.0, num), np.empty(num)
    level = 1.0
    for i in range(num):
        level = 0.9 * level + 0.1 * noise[i]
        values[i] = level
    return values


def grouped(values):
    ids = np.arange(len(values))
    groups, distributions, sketch = IdGroups(), Distributions(), Sketch()
    groups.add(ids, values)
    distributions.add(ids, values)
    sketch.add(values)
    return GroupedSeries(groups, distributions, sketch)


def test_intervals_hold_the_truth_as_often_as_those_of_all_values():
    """60 series with a true mean of 1: both kinds of interval hold it equally often, and at least 85 %."""
    held, of_all = [], []
    for seed in range(60):
        values = autocorrelated(12_000, seed)
        for found, one in ((held, interval_of(grouped(values))), (of_all, Series(values).interval())):
            if one.lack is None:
                found.append(one.low <= 1.0 <= one.high)
    assert len(held) >= 50
    assert len(of_all) >= 50
    assert np.mean(held) >= 0.85
    assert abs(np.mean(held) - np.mean(of_all)) <= 0.08


@pytest.mark.parametrize("figure", [MEAN, percentile(50), percentile(90)])
def test_an_interval_is_about_that_of_all_values(figure):
    values = autocorrelated(30_000, 1)
    one, other = interval_of(grouped(values), figure), Series(values).interval(figure)
    assert other.lack is None
    assert one.value == pytest.approx(other.value, rel=0.0005)
    width = other.high - other.low
    assert one.low == pytest.approx(other.low, abs=0.25 * width + 0.002)
    assert one.high == pytest.approx(other.high, abs=0.25 * width + 0.002)


def test_a_share_of_one_has_a_one_sided_interval():
    groups = IdGroups()
    groups.add(np.arange(300), np.ones(300))
    found = share_interval(MetSeries(groups), 300)
    assert (found.low, found.high) == (0.99, 1.0)
    groups.add(np.arange(300, 600), np.tile([0.0, 1.0], 150))
    found = share_interval(MetSeries(groups), 450)
    assert found.value == 0.75
    assert found.lack is Lack.DEPENDENT  # the misses are all in the second half


@given(st.lists(st.lists(st.floats(0, 5000), max_size=20), min_size=1, max_size=5), st.data())
def test_bins_are_the_same_in_any_order(parts, data):
    found = []
    for order in (parts, data.draw(st.permutations(parts))):
        whole = Bins(start_s=10.0)
        for part in order:
            own = Bins(start_s=10.0)
            own.count("events", np.array(part, float), np.arange(1, len(part) + 1))
            before = copy.deepcopy(own.sums)
            whole.merge(own)
            assert before.keys() == own.sums.keys()
        found.append(whole)
    one, other = found
    assert one.width_s == other.width_s
    assert one.of("events", MAX_BINS).tolist() == other.of("events", MAX_BINS).tolist()
    inside = [i for part in parts for i, time_s in enumerate(part, 1) if time_s >= 10]
    assert one.of("events", MAX_BINS).sum() == sum(inside)


def test_a_bin_counts_what_is_in_it():
    bins = Bins()
    bins.count("events", np.array([0.0, 0.4, 16.0, np.nan]))
    assert bins.width_s == 2**-5  # 16.0 s in at most 1,024 bins
    assert np.flatnonzero(bins.of("events", 600)).tolist() == [0, 12, 512]
    bins.count("events", np.array([100.0]), np.array([7]))
    assert bins.width_s == 2**-3
    assert bins.of("events", 801)[[0, 3, 128, 800]].tolist() == [1, 1, 1, 7]
    assert bins.of("nothing", 2).tolist() == [0, 0]
