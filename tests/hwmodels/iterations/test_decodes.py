"""Cost of the contexts of decodes: numbers, leaps and arrays agree, with any part left out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwmodels.by_count import RowsByCount
from hwmodels.exact import larger
from hwmodels.iterations.decodes import Decodes
from hwmodels.iterations.layout import RankBatch
from hwmodels.iterations.ops import DecodeSeconds, Operator, Per, largest


def make_operator(lines, calls=1.0, window=None):
    return Operator(
        name="attention_decode",
        component="attention",
        per=Per.decode,
        calls=calls,
        seconds=DecodeSeconds(lines, window),
    )


def two_lines(num_seqs):
    """Returns two lines (intercept, slope): 2 s a sequence, and 1 s plus 0.1 s a token."""
    return (2.0 * num_seqs, 0.0), (1.0, 0.1)


def batch_of(num_seqs, context):
    return RankBatch(num_seqs, num_seqs, num_seqs, num_seqs, context, 0, 0, 0, 0)


def test_an_operator_takes_its_highest_line():
    decodes = Decodes([make_operator(two_lines, calls=3)])
    assert decodes.seconds(4, 10) == 3 * 8
    assert decodes.seconds(4, 100) == pytest.approx(3 * 11)


def test_operators_add_up():
    decodes = Decodes([make_operator(two_lines, calls=3), make_operator(lambda n: ((5.0, 0.0),))])
    assert decodes.seconds(4, 10) == 3 * 8 + 5


def test_a_window_cuts_the_contexts_of_all_sequences():
    """4 sequences see 20 tokens each at most: 80 of the 1,000."""
    decodes = Decodes([make_operator(two_lines, window=20)])
    assert decodes.seconds(4, 1000) == pytest.approx(1 + 8)
    assert decodes.seconds_many(4, np.array([70.0, 75.0, 1000.0])) == pytest.approx([8, 8.5, 9])


def test_an_operator_whose_price_is_no_set_of_lines_is_a_bug():
    operator = Operator(
        name="norm", component="elementwise", per=Per.token, calls=1, seconds=lambda batch: 1.0
    )
    with pytest.raises(AssertionError, match="norm"):
        Decodes([operator])


slopes = st.floats(0, 1e-3)
lines = st.lists(st.tuples(st.floats(0, 1), slopes), min_size=1, max_size=4)


@given(
    st.lists(st.tuples(lines, st.sampled_from([None, 1, 128])), min_size=1, max_size=3),
    st.integers(1, 700),
    st.lists(st.integers(0, 10_000), min_size=1, max_size=5),
)
def test_numbers_leaps_arrays_and_operators_agree_to_the_last_bit(drawn, num_seqs, contexts):
    def lines_of(own):
        return lambda n: tuple((larger(fixed_s * n, 0.5), token_s) for fixed_s, token_s in own)

    operators = [make_operator(lines_of(own), 3.0, window) for own, window in drawn]
    decodes = Decodes(operators)
    expected = []
    for context in contexts:
        total_s = 0.0
        for operator in operators:
            total_s += operator.calls * operator.seconds(batch_of(num_seqs, context))
        expected.append(total_s)
    array = np.array(contexts)
    assert [decodes.seconds(num_seqs, context) for context in contexts] == expected
    assert np.broadcast_to(decodes.seconds_many(num_seqs, array), array.shape).tolist() == expected
    assert decodes.seconds_many(np.full_like(array, num_seqs), array).tolist() == expected


def test_the_largest_of_lines_is_taken_context_by_context():
    assert largest(((1.0, 0.0), (0.0, 1.0)), np.array([0.5, 2.0])).tolist() == [1.0, 2.0]


def test_rows_are_computed_once_and_grow_as_asked():
    asked = []

    def formula(counts):
        asked.append(len(counts))
        return counts, 2 * counts, 7.0

    rows = RowsByCount(formula)
    assert rows.of_many(np.array([3, 0])).tolist() == [[3, 0], [6, 0], [7, 7]]
    assert rows.of_many(np.array(5)).tolist() == [5, 10, 7]
    assert rows.of_many(np.array([256])).tolist() == [[256], [512], [7]]
    assert asked == [256, 512]
    assert rows.of_many(np.array([], dtype=np.intp)).shape == (3, 0)


@given(
    st.lists(st.tuples(lines, st.sampled_from([None, 1, 128])), min_size=1, max_size=3),
    st.integers(1, 700),
    st.tuples(st.floats(0, 2), st.floats(0, 2)),
    st.lists(st.floats(0, 1e5), min_size=1, max_size=5),
)
def test_straight_lines_are_the_price_to_the_last_bit(drawn, num_seqs, bounds, beyond):
    """The lines hold beyond the context that they name."""
    counted_s, floor_s = bounds
    decodes = Decodes([make_operator(lambda n, own=own: tuple(own), 3.0, window) for own, window in drawn])
    straight = decodes.straight(num_seqs, counted_s, floor_s)
    if straight.from_context == np.inf:
        return
    for context in (straight.from_context + more for more in (0.0, *beyond)):
        total_s = 0.0
        for calls, fixed_s, token_s in straight.lines:
            total_s += calls * (fixed_s + token_s * context)
        assert total_s == decodes.seconds(num_seqs, context)
        assert counted_s + total_s >= floor_s


def test_straight_lines_hold_from_where_the_steepest_is_the_highest():
    """The second line passes the first at 70 tokens; 1 s more passes a floor of 31 s at 90 tokens."""
    decodes = Decodes([make_operator(two_lines, calls=3)])
    straight = decodes.straight(4, 0.0, 0.0)
    assert straight.lines == [(3, 1.0, 0.1)]
    assert straight.from_context == pytest.approx(70)
    assert decodes.straight(4, 1.0, 31.0).from_context == pytest.approx(90)


def test_straight_lines_never_hold_below_a_floor_or_where_two_are_equal_but_for_rounding():
    flat = Decodes([make_operator(lambda n: ((5.0, 0.0),))])
    assert flat.straight(4, 0.0, 4.0).from_context == 0
    assert flat.straight(4, 0.0, 6.0).from_context == np.inf
    parallel = Decodes([make_operator(lambda n: ((5.0, 0.1), (1.0, 0.1 * (1 + 1e-15))))])
    assert parallel.straight(4, 0.0, 0.0).from_context == np.inf
