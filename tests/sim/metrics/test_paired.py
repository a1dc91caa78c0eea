"""Paired comparisons against hand-computed intervals, and the coverage of their confidence level."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.metrics.confidence import (
    Held,
    Interval,
    Outcome,
    compare_paired,
    judge_ratio,
    mean_interval,
)

NAN = math.nan
POSITIVE = st.floats(1e-3, 1e6)


def ratio(mean, low, high, num_values=5):
    return Interval(mean, low, high, num_values)


def test_the_interval_of_a_mean_is_students():
    # 1..5: s = sqrt(2.5) = 1.5811; t(4, 0.975) = 2.7764; half width 2.7764 * 1.5811 / sqrt(5) = 1.9632
    found = mean_interval([1, 2, 3, 4, 5])
    assert found == pytest.approx((3, 3 - 1.9632, 3 + 1.9632, 5), abs=1e-4)


def test_two_seeds_have_a_wide_interval():
    # s = sqrt(2), t(1, 0.975) = 12.706: half width 12.706
    assert mean_interval([0, 2]) == pytest.approx((1, -11.706, 13.706, 2), abs=1e-3)


def test_values_without_spread_have_an_interval_of_no_width():
    found = mean_interval([0.1] * 7)
    assert found == (0.1, 0.1, 0.1, 7)
    assert found.is_exact


def test_one_value_has_a_mean_but_no_bounds_and_none_has_nothing():
    one, none = mean_interval([4.0, NAN]), mean_interval([NAN])
    assert (one.mean, one.num_values) == (4.0, 1)
    assert math.isnan(one.low)
    assert math.isnan(one.high)
    assert not one.is_exact
    assert math.isnan(none.mean)
    assert none.num_values == 0


def test_ratios_pair_where_differences_do_not():
    """Three times as much at every seed, however different the seeds are."""
    found = compare_paired([30, 42, 57], [10, 14, 19])
    assert found.ratio == pytest.approx((3, 3, 3, 3))
    assert found.ratio.is_exact
    # 20, 28, 38: mean 28.667, s = 9.0185, t(2, 0.975) = 4.3027, half width 22.403
    assert found.difference == pytest.approx((28.667, 28.667 - 22.403, 28.667 + 22.403, 3), abs=1e-3)
    assert found.outcome("higher") is Outcome.BETTER
    assert found.outcome("lower") is Outcome.WORSE


def test_the_ratio_is_a_geometric_mean():
    # ln 2, ln 8: mean ln 4; s = ln 4 / sqrt(2), half width 12.706 * ln 4 / 2
    found = compare_paired([2, 8], [1, 1]).ratio
    half_width = 12.7062 * math.log(4) / 2
    assert found == pytest.approx((4, 4 * math.exp(-half_width), 4 * math.exp(half_width), 2), rel=1e-4)


def test_pairing_finds_what_unpaired_means_hide():
    """The seeds differ by far more than the arms: only the pairs tell them apart."""
    baseline = [100.0, 200, 300, 400, 500]
    values = [x * factor for x, factor in zip(baseline, [1.09, 1.10, 1.11, 1.10, 1.10], strict=True)]
    alone, other = mean_interval(values), mean_interval(baseline)
    assert alone.low < other.mean < alone.high
    assert compare_paired(values, baseline).outcome("higher") is Outcome.BETTER


def test_noise_is_no_difference():
    assert compare_paired([10, 11, 9], [11, 9, 10]).outcome("higher") is Outcome.NO_DIFFERENCE


def test_equal_to_rounding_is_equal():
    assert compare_paired([0.3, 0.6], [0.1 + 0.2, 0.6]).outcome("lower") is Outcome.EQUAL
    assert compare_paired([0, 0], [0, 0]).outcome("lower") is Outcome.EQUAL


def test_without_positive_values_the_difference_decides():
    found = compare_paired([0, 0, 0], [10, 11, 12])
    assert found.ratio is None
    assert found.outcome("lower") is Outcome.BETTER
    assert compare_paired([0, 5, 0], [1, 0, 1]).outcome("lower") is Outcome.NO_DIFFERENCE


def test_seeds_that_lack_the_figure_are_left_out_in_pairs():
    found = compare_paired([1, NAN, 3, 4], [2, 4, NAN, 8])
    assert (found.num_pairs, found.num_missing) == (2, 2)
    assert found.ratio == pytest.approx((0.5, 0.5, 0.5, 2))


@pytest.mark.parametrize(("values", "baseline"), [([], []), ([1], [2]), ([NAN, 1], [1, 2]), ([NAN], [NAN])])
def test_fewer_than_two_pairs_give_no_verdict(values, baseline):
    assert compare_paired(values, baseline).outcome("higher") is Outcome.UNKNOWN


def test_rejects_what_is_not_paired():
    with pytest.raises(ValueError, match="2 values and 1 of the baseline: must be equally many"):
        compare_paired([1, 2], [1])


@pytest.mark.parametrize(
    ("found", "bounds", "held"),
    [
        (ratio(4.1, 3.9, 4.3), {"at_least": 3}, Held.HELD),
        (ratio(3.1, 2.9, 3.3), {"at_least": 3}, Held.UNDECIDED),
        (ratio(2.0, 1.9, 2.1), {"at_least": 3}, Held.MISSED),
        (ratio(0.5, 0.4, 0.6), {"at_most": 0.7}, Held.HELD),
        (ratio(0.8, 0.75, 0.9), {"at_most": 0.7}, Held.MISSED),
        (ratio(1.5, 1.4, 1.6), {"at_least": 1, "at_most": 2}, Held.HELD),
        (ratio(1.5, 1.4, 2.6), {"at_least": 1, "at_most": 2}, Held.UNDECIDED),
        (ratio(3 - 1e-12, 3 - 1e-12, 3 - 1e-12), {"at_least": 3}, Held.HELD),
        (ratio(5, NAN, NAN, 1), {"at_least": 3}, Held.UNDECIDED),
        (None, {"at_least": 3}, Held.UNDECIDED),
    ],
)
def test_an_expectation_holds_with_its_whole_interval(found, bounds, held):
    assert judge_ratio(found, **bounds) is held


def test_an_expectation_needs_a_bound():
    with pytest.raises(ValueError, match="at least one must be given"):
        judge_ratio(ratio(1, 1, 1))


@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=2, max_size=8))
def test_swapping_the_arms_swaps_the_verdict(pairs):
    x, y = zip(*pairs, strict=True)
    opposite = {Outcome.BETTER: Outcome.WORSE, Outcome.WORSE: Outcome.BETTER}
    forth, back = compare_paired(x, y), compare_paired(y, x)
    assert back.outcome("higher") is opposite.get(forth.outcome("higher"), forth.outcome("higher"))
    assert forth.ratio.mean * back.ratio.mean == pytest.approx(1)


@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=2, max_size=8), st.floats(1e-3, 1e3))
def test_the_unit_of_a_figure_changes_no_ratio(pairs, unit):
    x, y = (np.array(side) for side in zip(*pairs, strict=True))
    assert compare_paired(unit * x, unit * y).ratio == pytest.approx(compare_paired(x, y).ratio, rel=1e-6)


def test_intervals_hold_the_truth_as_often_as_they_claim():
    """2,000 experiments of 5 seeds with a true ratio of 1.5: 95 % of the intervals, give or take 3 sigma."""
    rng = np.random.default_rng(7)
    traffic = np.exp(rng.normal(0, 1, (2000, 5)))
    noise = np.exp(rng.normal(0, 0.05, (2, 2000, 5)))
    found = [compare_paired(1.5 * t * a, t * b).ratio for t, a, b in zip(traffic, *noise, strict=True)]
    share = np.mean([interval.low <= 1.5 <= interval.high for interval in found])
    assert abs(share - 0.95) < 3 * math.sqrt(0.95 * 0.05 / 2000)
