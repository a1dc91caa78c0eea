"""Cost of the contexts of decodes: numbers, leaps and arrays agree, with any part left out."""

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwmodels.exact import highest, larger
from hwmodels.iterations.decodes import DecodeBatch, Decodes, OneByOne, ends_of
from hwmodels.iterations.layout import RankBatch
from hwmodels.iterations.ops import DecodeSeconds, Operator, Per


def make_operator(lines, calls=1.0, window=None):
    return Operator(
        name="attention_decode",
        component="attention",
        per=Per.decode,
        calls=calls,
        seconds=DecodeSeconds(
            lambda rows, num_seqs: tuple((*line, 0.0, 0.0) for line in lines(num_seqs)), window
        ),
    )


def two_lines(num_seqs):
    """Returns two lines (intercept, slope): 2 s a sequence, and 1 s plus 0.1 s a token."""
    return (2.0 * num_seqs, 0.0), (1.0, 0.1)


def batch_of(num_seqs, context):
    return RankBatch(num_seqs, num_seqs, num_seqs, num_seqs, context, 0, 0, 0, 0)


def test_an_operator_takes_its_highest_line():
    decodes = Decodes([make_operator(two_lines, calls=3)])
    assert decodes.seconds(batch_of(4, 10)) == 3 * 8
    assert decodes.seconds(batch_of(4, 100)) == pytest.approx(3 * 11)


def test_operators_add_up():
    decodes = Decodes([make_operator(two_lines, calls=3), make_operator(lambda n: ((5.0, 0.0),))])
    assert decodes.seconds(batch_of(4, 10)) == 3 * 8 + 5


def test_a_window_cuts_the_contexts_of_all_sequences():
    """4 sequences see 20 tokens each at most: 80 of the 1,000."""
    decodes = Decodes([make_operator(two_lines, window=20)])
    assert decodes.seconds(batch_of(4, 1000)) == pytest.approx(1 + 8)
    assert decodes.seconds(batch_of(4, np.array([70.0, 75.0, 1000.0]))) == pytest.approx([8, 8.5, 9])


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
    assert [decodes.seconds(batch_of(num_seqs, context)) for context in contexts] == expected
    assert np.broadcast_to(decodes.seconds(batch_of(num_seqs, array)), array.shape).tolist() == expected
    assert decodes.seconds(batch_of(np.full_like(array, num_seqs), array)).tolist() == expected


def test_the_largest_of_lines_is_taken_context_by_context():
    lines = (1.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0)
    assert highest(lines, np.array([0.5, 2.0]), 0, 0).tolist() == [1.0, 2.0]


@given(
    st.lists(st.tuples(lines, st.sampled_from([None, 1, 128])), min_size=1, max_size=3),
    st.integers(1, 700),
    st.integers(0, 3),
    st.tuples(st.floats(0, 2), st.floats(0, 2)),
    st.lists(st.integers(0, 100_000), min_size=1, max_size=60),
)
def test_prices_by_context_are_those_of_single_iterations_to_the_last_bit(
    drawn, num_seqs, rows, bounds, contexts
):
    """Each draft token sees all keys: 1 + rows pairs a key, and lines of keys only."""
    decodes = Decodes([make_operator(lambda n, own=own: tuple(own), 3.0, window) for own, window in drawn])
    parts = decodes.parts(num_seqs, 1 + rows)
    batch = DecodeBatch(bounds[0], bounds[1], 0.25, num_seqs, num_seqs * rows, parts)
    prices, ordered = batch.by_context(1 + rows), sorted(contexts)
    expected = [batch.seconds(context, 0) for context in ordered]
    assert prices.each(ordered) == expected
    assert prices.many(np.array(ordered)).tolist() == expected
    assert ends_of(prices, 0.5, ordered) == list(accumulate(expected, initial=0.5))[1:]


def test_pairs_and_rows_have_no_price_by_context_unless_keys_cost_more():
    """With two rows a key has two pairs, which cost less than the key, or more."""

    def batch_of_lines(*lines, tokens=4):
        return DecodeBatch(0.0, 0.0, 0.0, 4, tokens, [(1.0, None, lines)])

    of_keys, of_rows = (1.0, 0.1, 0.0, 0.0), (0.0, 0.0, 0.0, 1.0)
    assert batch_of_lines(of_keys, (1.0, 0.0, 0.04, 0.0)).by_context(2).each([6]) == [pytest.approx(2)]
    assert batch_of_lines(of_keys, (1.0, 0.0, 0.06, 0.0)).by_context(2) is None
    assert batch_of_lines(of_keys, of_rows).by_context(2) is None
    assert batch_of_lines((1.0, 0.0, 0.1, 0.0), tokens=0).by_context(1).each([10]) == [pytest.approx(2)]


def test_a_window_that_all_sequences_fill_has_one_price():
    """4 sequences of a window of 20 see 80 tokens: 3 (1 + 0.1 x 80) s from there on."""
    decodes = Decodes([make_operator(two_lines, calls=3, window=20)])
    prices = DecodeBatch(0.0, 0.0, 0.0, 4, 0, decodes.parts(4, 1)).by_context(1)
    assert prices.each([75, 80, 85, 1000]) == [pytest.approx(s) for s in (25.5, 27, 27, 27)]
    assert prices.many(np.array([80.0, 1000.0])) == pytest.approx([27, 27])


def test_an_iteration_takes_at_least_the_floor():
    """A floor of 31 s is passed at 94 tokens: 3 (1 + 0.1 x 94) = 31.2 s."""
    decodes = Decodes([make_operator(two_lines, calls=3)])
    prices = DecodeBatch(0.0, 31.0, 1.0, 4, 0, decodes.parts(4, 1)).by_context(1)
    assert prices.each([10, 20]) == [32.0, 32.0]
    assert prices.each([90, 94]) == [32.0, pytest.approx(32.2)]


def test_many_contexts_of_one_price_are_added_up():
    assert ends_of(OneByOne(lambda contexts: 2.0, few=1), 1.0, [5, 6, 7]) == [3.0, 5.0, 7.0]
