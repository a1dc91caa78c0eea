"""Time to publish and stalls of readers, worked out on paper."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.metrics.client_view import ClientView, published_s, stalls_s
from sim.metrics.token_times import TokenTimes

NAN = float("nan")
TIMES = TokenTimes(np.array([1.0, 2.0, 3.0, 7.0, 5.0]), np.array([4, 0, 1]))
"""Three requests: four tokens, no token, one token."""
FINISHED = np.array([True, False, True])


def view(**settings):
    return ClientView(**({"hidden_tokens": np.array([0, 0, 0])} | settings))


def test_without_hidden_tokens_the_first_token_is_published():
    assert published_s(TIMES, view(), FINISHED) == pytest.approx([1.0, NAN, 5.0], nan_ok=True)


def test_hidden_tokens_and_moderation_delay_publication():
    seen = view(hidden_tokens=np.array([2, 0, 0]), moderation_s=0.5)
    assert published_s(TIMES, seen, FINISHED) == pytest.approx([3.5, NAN, 5.5], nan_ok=True)


def test_a_complete_answer_is_published_with_its_last_token_if_it_has_finished():
    seen = view(streams=False, moderation_s=1.0)
    assert published_s(TIMES, seen, FINISHED) == pytest.approx([8.0, NAN, 6.0], nan_ok=True)
    unfinished = np.array([False, False, True])
    assert published_s(TIMES, seen, unfinished) == pytest.approx([NAN, NAN, 6.0], nan_ok=True)


def test_a_reader_waits_where_tokens_come_later_than_they_are_read():
    """One token a second: tokens at 1, 2, 3 s are in time, the fourth is read at 4 s but comes at 7 s."""
    assert stalls_s(TIMES, view(reading_tokens_per_s=1.0)) == pytest.approx([3.0, NAN, 0.0], nan_ok=True)
    assert stalls_s(TIMES, view(reading_tokens_per_s=0.5)) == pytest.approx([0.0, NAN, 0.0], nan_ok=True)
    hidden = view(reading_tokens_per_s=1.0, hidden_tokens=np.array([3, 0, 0]))
    assert stalls_s(TIMES, hidden) == pytest.approx([0.0, NAN, 0.0], nan_ok=True)
    assert stalls_s(TIMES, view(streams=False, reading_tokens_per_s=1.0))[0] == 0.0


@given(st.lists(st.lists(st.floats(0, 5), max_size=8), max_size=5), st.floats(0.1, 10), st.data())
def test_stalls_are_those_of_a_simulated_reader(gaps, reading, data):  # token by token
    tokens = [np.cumsum(one) for one in gaps]
    hidden = [data.draw(st.integers(0, max(len(one) - 1, 0))) for one in gaps]
    times = TokenTimes(np.concatenate([*tokens, []]), np.array([len(one) for one in tokens], np.int64))
    seen = view(reading_tokens_per_s=reading, hidden_tokens=np.array(hidden, np.int64))
    found = stalls_s(times, seen)
    for one, num_hidden, stall_s in zip(tokens, hidden, found, strict=True):
        if not len(one):
            assert np.isnan(stall_s)
            continue
        waited, reads_s = 0.0, one[num_hidden]
        for token_s in one[num_hidden + 1 :]:
            wants_s = reads_s + 1 / reading
            reads_s = max(wants_s, token_s)
            waited += reads_s - wants_s
        assert stall_s == pytest.approx(waited, abs=1e-9)
