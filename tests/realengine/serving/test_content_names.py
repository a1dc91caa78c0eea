"""Equal texts get equal names, block by block, and different texts never do."""

from hypothesis import given
from hypothesis import strategies as st

from policies.core.request import Segment
from realengine.serving.content_names import ContentNames

TOKENS = st.lists(st.integers(0, 1), max_size=20)


def by_token(segments):
    """Returns the content id of each token."""
    return [segment.content_id for segment in segments for _ in range(segment.num_tokens)]


@given(texts=st.lists(st.tuples(TOKENS, TOKENS), max_size=8), block_size=st.integers(1, 5))
def test_names_agree_exactly_as_far_as_texts_agree_in_whole_blocks(texts, block_size):
    names = ContentNames(block_size)
    seen = []  # (tokens, name of each)
    for prompt, answer in texts:
        segments = names.name(prompt)
        assert sum(segment.num_tokens for segment in segments) == len(prompt)
        named = by_token(segments)
        alike = []  # (tokens in common, name of each)
        for tokens, other in seen:
            common = 0
            while common < min(len(tokens), len(prompt)) and tokens[common] == prompt[common]:
                common += 1
            alike.append((common, other))
            assert all(a != b for a, b in zip(named[common:], other[common:], strict=False))
        longest = max((common for common, _ in alike), default=0)
        for end in range(block_size, longest + 1, block_size):  # of texts computed side by side, one's names
            block = slice(end - block_size, end)
            assert any(named[block] == other[block] for common, other in alike if common >= end)
        answer_id = names.new_id()
        names.learn(prompt + answer, segments, answer_id)
        seen.append((prompt + answer, named + [answer_id] * len(answer)))


def test_an_answer_is_one_run_for_the_turn_that_quotes_it():
    names = ContentNames(4)
    prompt = names.name([1, 2, 3, 4, 5])
    assert [segment.num_tokens for segment in prompt] == [4, 1]
    answer_id = names.new_id()
    names.learn([1, 2, 3, 4, 5, 6, 7, 8, 9], prompt, answer_id)
    turn = names.name([1, 2, 3, 4, 5, 6, 7, 8, 9, 9])
    assert turn[:3] == (*prompt, Segment(answer_id, 3))
    assert [segment.num_tokens for segment in turn[3:]] == [2]


def test_what_was_not_used_for_long_is_forgotten():
    names = ContentNames(2, max_blocks=2)
    first = names.name([1, 2])
    names.name([3, 4])
    names.name([5, 6])
    assert names.name([1, 2]) != first
