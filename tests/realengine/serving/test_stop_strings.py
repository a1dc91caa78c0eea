"""Stop strings end a text at the same place whatever pieces it comes in."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from realengine.serving.stop_strings import StopStrings


def shown(stop, pieces):
    """Returns the whole text that was shown, and the stop string that was found."""
    watch = StopStrings(stop)
    text = "".join([watch.add(piece) for piece in pieces])
    return text + watch.finish(), watch.found


def truth(stop, text):
    """Finds the first end of a stop string, character by character; of several, the longest string."""
    for end in range(1, len(text) + 1):
        complete = [one for one in stop if text[:end].endswith(one)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize(
    ("stop", "pieces", "expected"),
    [
        (["\n\n"], ["one\n", "\ntwo"], ("one", "\n\n")),
        (["\n\n"], ["one\n", "two\n"], ("one\ntwo\n", None)),
        (["STOP"], ["S", "T", "O", "P"], ("", "STOP")),
        (["aab"], ["a", "a", "a", "b"], ("a", "aab")),
        (["bc", "abcd"], ["abcd"], ("a", "bc")),
        (["bc", "abc"], ["xabc"], ("x", "abc")),
        (["b", "a"], ["xab"], ("x", "a")),
        (["é🙂"], ["caf", "é", "🙂"], ("caf", "é🙂")),
    ],
)
def test_the_text_ends_before_the_stop_string(stop, pieces, expected):
    assert shown(stop, pieces) == expected


@given(
    stop=st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3),
    pieces=st.lists(st.text("ab\n", max_size=5), max_size=8),
)
@example(stop=["abab"], pieces=["aba", "ba", "b"])
def test_whatever_the_pieces_it_ends_where_it_would_character_by_character(stop, pieces):
    assert shown(stop, pieces) == truth(stop, "".join(pieces))


@given(
    stop=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    text=st.text("ab", max_size=12),
)
def test_no_more_is_held_back_than_may_become_a_stop_string(stop, text):
    watch = StopStrings(stop)
    emitted = watch.add(text)
    if watch.found is None:
        held = text[len(emitted) :]
        assert text.startswith(emitted)
        assert not held or any(one.startswith(held) for one in stop)
        assert not any(
            one.startswith(text[len(text) - num :])
            for one in stop
            for num in range(len(held) + 1, len(text) + 1)
        )


def test_nothing_comes_behind_the_end():
    watch = StopStrings(["."])
    assert [watch.add(piece) for piece in ("one. ", "two", ".")] == ["one", "", ""]
    assert watch.finish() == ""


@pytest.mark.parametrize("stop", [[], [""], ["a", ""], "ab", [3]])
def test_rejects_stop_strings_that_cannot_be(stop):
    with pytest.raises(ValueError, match="must be a sequence of strings, none of them empty"):
        StopStrings(stop)
