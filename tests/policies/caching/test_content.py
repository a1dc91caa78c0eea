"""Places against explicit tokens: equal tokens up to a block's end mean equal place and number there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.caching.content import Places
from policies.core.request import Branching, Prompt, Request, Segment

BLOCK_SIZE = 4
ANSWER_TOKENS = 9

pieces = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1, 3, 4, 8, 11, 16])), max_size=5)
asks = st.tuples(
    st.integers(0, 5), pieces, st.integers(0, 9), st.none() | st.integers(0, 2), st.sampled_from([None, "x"])
)


def tokens_of(request):
    """Returns tokens of the prompt and the answer; tokens are equal exactly where contents are equal."""
    tokens = [(request.adapter, name, i) for name, n in request.prompt.segments for i in range(n)]
    tokens += [("rest", request.request_id, i) for i in range(request.prompt.num_tokens - len(tokens))]
    answer = (request.adapter, request.answer_id)
    if request.answer_id is None:
        answer = ("answer", request.request_id)
    return tokens + [(*answer, i) for i in range(ANSWER_TOKENS)]


def numbered(path, num_blocks):
    """Returns the place of each block of a sequence, and the block's number there."""
    blocks, start = [], 0
    for place, end in path:
        blocks += [(place, block - start) for block in range(start, min(end, num_blocks))]
        start = end
    return blocks


@pytest.mark.parametrize("is_per_segment", [False, True])
@given(st.lists(asks, min_size=1, max_size=8, unique_by=lambda ask: ask[0]))
def test_blocks_have_the_same_name_where_all_tokens_up_to_them_are_equal(is_per_segment, drawn):
    places = Places(BLOCK_SIZE, is_per_segment)
    name_of, tokens_at = {}, {}
    for request_id, segments, rest, answer_id, adapter in drawn:
        num_tokens = sum(n for _, n in segments) + rest
        if not num_tokens:
            continue
        prompt = Prompt(num_tokens, tuple(Segment(*segment) for segment in segments))
        request = Request(request_id, 0.0, prompt, answer_id=answer_id, adapter=adapter)
        tokens = tokens_of(request)
        names = numbered(places.path(request), len(tokens) // BLOCK_SIZE)
        assert len(names) == len(tokens) // BLOCK_SIZE
        assert (
            numbered(places.known_path(request), num_tokens // BLOCK_SIZE)
            == names[: num_tokens // BLOCK_SIZE]
        )
        for number, name in enumerate(names):
            prefix = tuple(tokens[: (number + 1) * BLOCK_SIZE])
            assert name_of.setdefault(prefix, name) == name
            assert tokens_at.setdefault(name, prefix) == prefix


def test_a_path_has_a_stretch_for_each_place_where_requests_differ():
    places = Places(BLOCK_SIZE)
    texts = {n: Request(n, 0.0, Prompt(24, (Segment(7, 8), Segment(8, 8), Segment(n, 8)))) for n in (1, 2)}
    assert [end for _, end in places.path(texts[1])[:-1]] == [6]
    assert [end for _, end in places.path(texts[2])[:-1]] == [4, 6]
    assert len(Places(BLOCK_SIZE, is_per_segment=True).path(texts[1])) == 4


def test_no_request_quotes_one_of_several_answers():
    places = Places(BLOCK_SIZE)
    assert places.path(Request(0, 0.0, Prompt(9), branching=Branching(2)))[-1][1] == 2


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=12),
    st.booleans(),
)
def test_a_turn_that_quotes_the_last_answer_is_found_where_its_tokens_are(turns, forgets):
    """A request quotes any earlier one, even one that was quoted before; answers may be cut short."""
    places, name_of, tokens_at = Places(BLOCK_SIZE), {}, {}
    said = [()]
    for request_id, (quoted, message, answer) in enumerate(turns):
        segments = (*said[quoted % len(said)], Segment(message % 3, message))
        num_tokens = sum(n for _, n in segments)
        request = Request(request_id, 0.0, Prompt(num_tokens, segments), answer_id=100 + request_id % 5)
        tokens = tokens_of(request)
        for number, name in enumerate(numbered(places.path(request), len(tokens) // BLOCK_SIZE)):
            prefix = tuple(tokens[: (number + 1) * BLOCK_SIZE])
            assert name_of.setdefault(prefix, name) == name
            assert tokens_at.setdefault(name, prefix) == prefix
        said.append((*segments, Segment(100 + request_id % 5, answer)) if answer else segments)
        if forgets and request_id == 5:
            places.forget_unused({place for place, _ in name_of.values()})
