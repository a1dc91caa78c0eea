import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.metrics.definitions import describe, weighted_percentile
from sim.metrics.sketches import PERCENTILE_ERROR, Sketch, bucket_of, middle_of

Q = (0, 1, 10, 50, 90, 95, 99, 99.9, 100)
SMALL = 2.0**-40
times = st.one_of(st.just(0.0), st.just(-0.0), st.floats(1e-15, 1e6), st.floats(0.01, 0.02))
values_and_counts = st.lists(st.tuples(times, st.integers(0, 5)), max_size=50)


def sketch_of(pairs):
    sketch = Sketch()
    sketch.add(np.array([v for v, _ in pairs], float), np.array([c for _, c in pairs], np.int64))
    return sketch


@given(values_and_counts)
def test_percentiles_are_within_the_error(pairs):
    found = sketch_of(pairs).percentiles(Q)
    exact = weighted_percentile(
        np.array([v for v, _ in pairs], float), np.array([c for _, c in pairs], np.int64), Q
    )
    assert np.array_equal(np.isnan(found), np.isnan(exact))
    assert np.all(np.isnan(exact) | (np.abs(found - exact) <= PERCENTILE_ERROR * exact + SMALL))


@given(values_and_counts)
def test_the_other_statistics_are_those_of_describe(pairs):
    found = sketch_of(pairs).describe()
    values = np.array([v for v, _ in pairs], float)
    exact = describe(values, np.array([c for _, c in pairs], np.int64))
    assert found.keys() == exact.keys()
    for name in ("count", "min_s", "max_s"):
        assert found[name] == exact[name] or (math.isnan(found[name]) and math.isnan(exact[name]))
    assert found["mean_s"] == pytest.approx(exact["mean_s"], rel=1e-12, nan_ok=True)


@given(st.lists(values_and_counts, min_size=1, max_size=6), st.data())
def test_merging_in_any_order_gives_the_same_sketch(parts, data):
    whole = sketch_of([pair for part in parts for pair in part])
    merged = Sketch()
    for part in data.draw(st.permutations(parts)):
        merged.merge(pickle.loads(pickle.dumps(sketch_of(part))))
    assert np.array_equal(merged.percentiles(Q), whole.percentiles(Q), equal_nan=True)
    assert str(merged.describe()) == str(whole.describe())
    assert [part.tolist() for part in merged.points()] == [part.tolist() for part in whole.points()]


def test_a_bucket_is_as_wide_as_twice_the_error_allows():
    values = np.random.default_rng(0).uniform(0.5, 4.0, 1000)
    buckets = bucket_of(values)
    assert np.all(np.abs(middle_of(buckets) - values) <= PERCENTILE_ERROR * values)
    assert len(np.unique(bucket_of(np.linspace(1, 2, 100_000, endpoint=False)))) == 1024


def test_nan_is_left_out_and_counts_are_counted():
    sketch = Sketch()
    sketch.add(np.array([1.0, math.nan, 3.0]))
    sketch.add(np.array([2.0, 5.0]), np.array([2, 0]))
    assert sketch.count == 4
    assert sketch.mean == 2.0
    assert sketch.count_upto(2.0) == 0.75 * sketch.count
    assert sketch.count_upto(0.5) == 0


def test_a_negative_value_is_an_error():
    with pytest.raises(ValueError, match=r"-0\.5: a sketch takes values >= 0 only"):
        Sketch().add(np.array([1.0, -0.5]))
