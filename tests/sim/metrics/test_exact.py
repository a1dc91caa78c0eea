import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.metrics.sums import ExactTotals, exact_units

UNITS = 1 << 1074
numbers = st.floats(-1e300, 1e300, allow_nan=False, allow_subnormal=True)


@given(st.lists(numbers, max_size=60))
def test_a_sum_is_rounded_once(values):
    # math.fsum is the correctly rounded sum.
    assert exact_units(np.array(values, float)) / UNITS == math.fsum(values)


def test_a_sum_of_many_values_is_rounded_once():
    rng = np.random.default_rng(3)
    values = rng.lognormal(0, 20, 50_001) * rng.choice([-1, 1], 50_001)
    assert exact_units(values) / UNITS == math.fsum(values.tolist())


@given(st.lists(numbers, min_size=1, max_size=30), st.data())
def test_partial_sums_in_any_order_give_the_same_sum(values, data):
    parts = []
    for part in np.split(np.array(values), sorted(data.draw(st.lists(st.integers(0, len(values)))))):
        parts.append(ExactTotals())
        parts[-1].add("sum", part)
        parts[-1].raise_to("largest", part)
    whole = ExactTotals()
    for part in data.draw(st.permutations(parts)):
        whole.merge(pickle.loads(pickle.dumps(part)))
    assert whole["sum"] == math.fsum(values)
    assert whole.largest("largest") == max(0, *values)


def test_sums_of_integers_and_booleans_are_integers():
    totals = ExactTotals()
    totals.add("count", np.array([2**62, 1]))
    totals.add("count", np.array([2**62, 1]))
    totals.add("true", np.array([True, False, True]))
    assert totals["count"] == 2**63 + 2
    assert totals["true"] == 2
    assert totals["nothing"] == totals.largest("nothing") == 0


@pytest.mark.parametrize("value", [math.inf, math.nan, 2.0**1001])
def test_a_value_that_cannot_be_summed_is_an_error(value):
    with pytest.raises(OverflowError, match="cannot be summed exactly"):
        exact_units(np.array([1.0, value]))
