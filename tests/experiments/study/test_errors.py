import math

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.study.errors import SHARE, errors, errors_of_groups, relative_errors

POSITIVE = st.floats(1e-6, 1e6)


def test_errors_of_three_rows_by_hand():
    found = errors([11.0, 8.0, 30.0], [10.0, 10.0, 20.0])
    assert (found.rows, found.coverage) == (3, 1.0)
    assert found.mean == pytest.approx((10 + 20 + 50) / 3)
    assert found.median == pytest.approx(20.0)
    assert found.p90 == pytest.approx(20 + 0.8 * 30)  # linear between the second and the third of three
    assert found.bias == pytest.approx(10.0)
    assert (found.low, found.high) == (pytest.approx(-20 + 0.2 * 30), pytest.approx(10 + 0.8 * 40))
    assert found.total == pytest.approx(100 * (49 / 40 - 1))


def test_shares_are_percentages_over_100():
    assert errors([11.0], [10.0], unit=SHARE).median == pytest.approx(0.1)
    assert relative_errors([11.0, 5.0], [10.0, 10.0], unit=SHARE).tolist() == pytest.approx([0.1, -0.5])


def test_rows_without_a_prediction_lower_the_coverage_only_and_unmeasured_rows_do_not_count():
    found = errors([11.0, math.nan, 7.0], [10.0, 10.0, math.nan])
    assert (found.rows, found.coverage, found.median) == (2, 0.5, pytest.approx(10.0))


def test_without_a_prediction_statistics_are_unknown():
    found = errors([math.nan], [10.0])
    assert (found.rows, found.coverage) == (1, 0.0)
    assert all(math.isnan(value) for value in (found.mean, found.median, found.p90, found.bias, found.total))
    assert math.isnan(errors([], []).coverage)


def test_groups_have_the_errors_of_their_rows_and_those_without_a_measurement_are_left_out():
    rows = pd.DataFrame(
        {"gpu": ["a", "a", "b", "c"], "ms": [10.0, 10.0, 20.0, math.nan], "ours": [11.0, 9.0, 30.0, 1.0]}
    )
    found = {(group, value): one for group, value, one in errors_of_groups(rows, "ours", "ms", ["gpu", "no"])}
    assert list(found) == [("all", ""), ("gpu", "a"), ("gpu", "b")]
    assert found["all", ""] == errors(rows["ours"], rows["ms"])
    assert found["gpu", "b"].bias == pytest.approx(50.0)


@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=30))
def test_statistics_are_in_order(pairs):
    predicted, measured = zip(*pairs, strict=True)
    found = errors(predicted, measured)
    assert 0 <= found.median <= found.p90
    assert found.low <= found.bias <= found.high
    assert abs(found.bias) <= max(found.p90, found.median, abs(found.low), abs(found.high)) + 1e-9
