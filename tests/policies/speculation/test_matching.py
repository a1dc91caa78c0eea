"""Drafts by n-grams and by suffix decoding, compared with definitions that try every possibility."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.speculation.matching import SEPARATOR, SuffixRules, Text, ngram_draft, ngram_matches

texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)
sizes = st.tuples(st.integers(1, 4), st.integers(0, 3)).map(lambda pair: (pair[0], sum(pair)))


def draft_by_trying(context, min_ngram, max_ngram, num_tokens):
    """Compares every earlier n-gram with the last one, the longest first and from the beginning."""
    for length in range(min(max_ngram, len(context) - 1), min_ngram - 1, -1):
        for start in range(len(context) - length):
            if context[start : start + length] == context[-length:]:
                return context[start + length : start + length + num_tokens]
    return []


@given(texts, sizes, st.integers(0, 6))
def test_an_ngram_draft_follows_the_earliest_of_the_longest_matches(text, sizes, num_tokens):
    found = ngram_draft(np.array(text), *sizes, num_tokens)
    assert found.tolist() == draft_by_trying(text, *sizes, num_tokens)


@given(texts, sizes, st.integers(0, 40))
def test_drafts_of_all_contexts_are_those_of_each(text, sizes, first):
    tokens = np.array(text)
    matches = ngram_matches(tokens, first, *sizes)
    assert len(matches.starts) == max(len(text) - first, 0)
    for end, start, limit in zip(range(first, len(text)), *matches, strict=True):
        assert text[start : start + limit] == draft_by_trying(text[:end], *sizes, len(text))


def test_the_example_of_the_module():
    context = np.array([5, 6, 7, 8, 5, 6, 9, 5, 6])
    assert ngram_draft(context, 2, 2, 3).tolist() == [7, 8, 5]
    assert ngram_draft(context, 3, 3, 3).tolist() == []


def test_a_context_without_tokens_has_no_draft():
    assert ngram_draft(np.array([], np.int64), 1, 3, 4).tolist() == []
    assert Text().draft([], 4, SuffixRules()).tokens == []


def suffix_draft_by_counting(sequences, context, num_tokens, rules):
    """Returns the best score by counting every continuation in all sequences, and whether ties were met."""
    depth, factor, least = rules
    context = context[-depth:]

    def count(pattern):
        size = len(pattern)
        return sum(s[i : i + size] == pattern for s in sequences for i in range(len(s) - size + 1))

    best, has_tie = 0.0, False
    for length in range(1, len(context)):
        pattern = context[-length:]
        if not count(pattern):
            break
        limit = min(num_tokens, int(length * factor + 1e-6), depth - length)
        probability, score = 1.0, 0.0
        for _ in range(limit):
            after = Counter({token: count([*pattern, token]) for token in range(4)})
            (token, most), (_, second) = after.most_common(2)
            if not most:
                break
            has_tie |= most == second
            probability *= most / count(pattern)
            if probability < least:
                break
            score += probability
            pattern = [*pattern, token]
        best = max(best, score)
    return best, has_tie


@given(
    st.lists(texts, min_size=1, max_size=3),
    st.one_of(st.none(), texts),
    st.integers(1, 8),
    st.tuples(st.integers(1, 8), st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([0.0, 0.1, 0.4])),
)
def test_a_suffix_draft_has_the_largest_sum_of_probabilities(sequences, context, num_tokens, rules):
    context = sequences[-1] if context is None else context
    text = Text()
    for number, sequence in enumerate(sequences):
        text.extend(([SEPARATOR] if number else []) + sequence)
    draft = text.draft(context, num_tokens, SuffixRules(*rules))
    expected, has_tie = suffix_draft_by_counting(sequences, context, num_tokens, rules)
    assert draft.score == pytest.approx(expected) or has_tie
    assert len(draft.tokens) <= num_tokens
    assert draft.score <= len(draft.tokens) + 1e-9


def test_a_suffix_draft_follows_the_majority():
    text = Text()
    for sequence in ([1, 2, 3], [1, 2, 4], [1, 2, 4, 5]):
        text.extend([*sequence, SEPARATOR])
    draft = text.draft([9, 1, 2], 4, SuffixRules(max_spec_factor=4.0))
    assert draft.tokens == [4, 5]
    assert draft.score == pytest.approx(2 / 3 + 1 / 3)
    assert text.draft([9, 1, 2], 4, SuffixRules(max_spec_factor=4.0, min_token_prob=0.5)).tokens == [4]
    assert text.draft([9, 1, 2], 4, SuffixRules(max_spec_factor=0.5)).tokens == [4]


def test_only_a_part_of_the_text_may_be_used():
    text = Text()
    text.extend([1, 2, 3, SEPARATOR, 1, 2, 4, 4, SEPARATOR, 1, 2])
    rules = SuffixRules(max_spec_factor=4.0)
    assert text.draft([1, 2], 1, rules, end=4).tokens == [3]
    assert text.draft([1, 2], 1, rules, begin=4).tokens == [4]
    assert text.draft([1, 2], 1, rules, begin=9).tokens == []
