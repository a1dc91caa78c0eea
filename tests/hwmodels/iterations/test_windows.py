"""Attention windows against real windows, sequence by sequence and query by query."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwmodels.iterations.layout import ParallelLayout, within_window

windows = st.integers(1, 60)


def cut(shape, window):
    return within_window(ParallelLayout().rank_batch(shape), window)


def pairs_inside(new, cached, window):
    """Counts (query, key) pairs: query i (from 1) sees itself and earlier tokens, `window` tokens at most."""
    return sum(min(cached + i, window) for i in range(1, new + 1))


def keys_inside(new, cached, window):
    """Counts the tokens that any query of a chunk sees: the new ones, and those in the first one's window."""
    return new + min(cached, window)


def test_no_window_changes_nothing(make_shape):
    batch = ParallelLayout().rank_batch(make_shape([100, 20], [(50, 10)]))
    assert within_window(batch, None) is batch


@given(count=st.integers(1, 9), context=st.integers(1, 100), window=windows)
def test_decodes_that_are_alike_see_their_windows(make_shape, count, context, window):
    batch = cut(make_shape([context] * count), window)
    assert batch.decode_context_tokens == count * min(context, window)


@given(count=st.integers(1, 9), new=st.integers(1, 80), cached=st.integers(0, 100), window=windows)
def test_chunks_that_are_alike_see_their_windows(make_shape, count, new, cached, window):
    batch = cut(make_shape(chunks=[(new, cached)] * count), window)
    assert batch.prefill_pairs == pytest.approx(count * pairs_inside(new, cached, window))
    assert batch.prefill_context_tokens == count * keys_inside(new, cached, window)


def test_a_chunk_by_hand(make_shape):
    """4 new tokens on 2 cached ones, window 3: they see 3, 3, 3 and 3; 6 tokens are read."""
    batch = cut(make_shape(chunks=[(4, 2)]), 3)
    assert (batch.prefill_pairs, batch.prefill_context_tokens) == (12, 6)


@given(
    contexts=st.lists(st.integers(1, 100), min_size=1, max_size=9),
    chunks=st.lists(st.tuples(st.integers(1, 80), st.integers(0, 100)), max_size=5),
    window=windows,
)
def test_a_mixture_is_counted_in_full_or_too_high_but_never_above_no_window(
    make_shape, contexts, chunks, window
):
    """min(mean, w) >= mean of min(., w): the sums of a mixture hide which contexts are below the window."""
    whole = ParallelLayout().rank_batch(make_shape(contexts, chunks))
    batch = within_window(whole, window)
    assert sum(min(context, window) for context in contexts) <= batch.decode_context_tokens
    assert sum(keys_inside(*chunk, window) for chunk in chunks) <= batch.prefill_context_tokens
    for name in ("decode_context_tokens", "prefill_pairs", "prefill_context_tokens"):
        assert getattr(batch, name) <= getattr(whole, name)


@given(
    contexts=st.lists(st.integers(60, 400), min_size=1, max_size=9),
    window=windows,
)
def test_contexts_that_are_all_longer_than_the_window_are_counted_exactly(make_shape, contexts, window):
    assert cut(make_shape(contexts), window).decode_context_tokens == window * len(contexts)


@given(
    contexts=st.lists(st.integers(1, 60), min_size=1, max_size=9),
    chunks=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), max_size=5),
)
def test_contexts_that_are_all_shorter_are_not_cut(make_shape, contexts, chunks):
    whole = ParallelLayout().rank_batch(make_shape(contexts, chunks))
    batch = within_window(whole, 60)
    assert batch.decode_context_tokens == whole.decode_context_tokens
    assert batch.prefill_context_tokens == whole.prefill_context_tokens
