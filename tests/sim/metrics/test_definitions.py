"""TTFT, TPOT and the rest by hand, and percentiles against numpy's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.metrics.definitions import PERCENTILES, describe, e2e_s, queue_s, tpot_s, ttft_s, weighted_percentile

counted_values = st.lists(
    st.tuples(st.floats(0, 1e6, allow_subnormal=False), st.integers(0, 40)), min_size=1, max_size=30
).filter(lambda pairs: sum(count for _, count in pairs) > 0)


def test_latencies_of_one_request():
    arrival, scheduled, first, last = (np.array([t]) for t in (0.25, 0.5, 1.0, 1.9))
    assert queue_s(arrival, scheduled) == 0.25
    assert ttft_s(arrival, first) == 0.75
    assert e2e_s(arrival, last) == pytest.approx(1.65)
    assert tpot_s(first, last, np.array([10])) == pytest.approx(0.1)


def test_an_answer_of_one_token_has_no_tpot():
    moment = np.array([1.0])
    assert np.isnan(tpot_s(moment, moment, np.array([1])))


def test_one_slow_request_of_ten_spoils_the_mean_but_not_the_median():
    ttft = np.array([100, 102, 100, 100, 99, 104, 110, 90, 3000, 95]) / 1e3
    figures = describe(ttft)
    assert figures["count"] == 10
    assert figures["mean_s"] == pytest.approx(0.390)
    assert figures["p50_s"] == pytest.approx(0.100)
    assert (figures["min_s"], figures["max_s"]) == (0.090, 3.0)


@given(counted_values, st.lists(st.floats(0, 100), min_size=1, max_size=6))
def test_weighted_percentile_is_numpys_on_the_expanded_values(pairs, q):
    values, counts = (np.array(column) for column in zip(*pairs, strict=True))
    expected = np.percentile(np.repeat(values, counts), q)
    assert weighted_percentile(values, counts, q).tolist() == expected.tolist()  # to the last bit


@given(counted_values)
def test_describing_counted_values_equals_describing_each(pairs):
    values, counts = (np.array(column) for column in zip(*pairs, strict=True))
    counted, each = describe(values, counts), describe(np.repeat(values, counts))
    assert counted.pop("mean_s") == pytest.approx(each.pop("mean_s"))
    assert counted == each


def test_what_did_not_happen_is_left_out():
    assert describe(np.array([np.nan, 2.0, 4.0]))["mean_s"] == 3.0


def test_nothing_to_describe_gives_a_count_of_zero_and_no_figures():
    figures = describe(np.array([np.nan]))
    assert figures.pop("count") == 0
    assert len(figures) == 3 + len(PERCENTILES)
    assert all(np.isnan(value) for value in figures.values())


@pytest.mark.parametrize("q", [-1, 100.5, float("nan")])
def test_rejects_percentiles_outside_0_to_100(q):
    with pytest.raises(ValueError, match=r"must be in \[0, 100\]"):
        weighted_percentile(np.array([1.0]), np.array([1]), [q])
