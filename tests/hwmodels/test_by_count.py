"""A tabulated function returns the formula's values for numbers, ranges and arrays."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hwmodels.iterations.ops import PIECE, ByCount

counts = st.lists(st.integers(0, 20 * PIECE), max_size=30)


def formula(n):
    return np.sqrt(n) * 1e-6


@given(asked=st.lists(st.one_of(counts, st.integers(0, 20 * PIECE)), max_size=8))
def test_numbers_and_arrays_get_the_formula_in_any_order(asked):
    table, expected = ByCount(formula), formula(np.arange(21.0 * PIECE))
    for one in asked:
        if isinstance(one, int):
            assert table.of(one) == expected[one]
        else:
            assert table.of(np.array(one, dtype=np.intp)).tolist() == expected[one].tolist()


def test_many_have_the_shape_that_they_were_asked_in():
    table = ByCount(formula)
    assert table.of(np.zeros((3, 0), dtype=np.intp)).shape == (3, 0)
    assert table.of(np.array([[1, 300], [700, 2]])).shape == (2, 2)


def test_each_piece_is_computed_once_and_only_if_it_is_asked_for():
    computed = []

    def noting(n):
        computed.append((int(n[0]), len(n)))
        return formula(n)

    table = ByCount(noting)
    table.of(10 * PIECE + 1)
    table.of(np.array([3, 10 * PIECE, 5, 11 * PIECE - 1]))
    table.of(3)
    assert computed == [(10 * PIECE, PIECE), (0, PIECE)]


def test_a_value_does_not_depend_on_its_neighbours():
    """numpy may round a long array otherwise than a short one: pieces are always the same."""
    table, other = ByCount(np.exp2), ByCount(np.exp2)
    together = table.of(np.arange(0, 4 * PIECE, 7) % 60)
    assert [other.of(int(n)) for n in np.arange(0, 4 * PIECE, 7) % 60] == together.tolist()


def test_a_number_is_a_float():
    assert type(ByCount(formula).of(4)) is float
