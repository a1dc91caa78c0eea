"""Drafts by matching token ids: prompt lookup (vLLM's ngram), and suffix decoding."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.integer]


def ngram_draft(context: Tokens, min_ngram: int, max_ngram: int, num_tokens: int) -> Tokens:
    """Returns the draft of at most num_tokens tokens after a context; empty if no n-gram occurs earlier.

    Prompt lookup drafts the tokens that followed an earlier occurrence of the latest tokens. As in vLLM's
    ngram method, of the n-grams with min_ngram to max_ngram tokens at the end of the context, the longest one
    that occurs earlier in the context is used, at its earliest occurrence. An occurrence may overlap the end
    of the context. The tokens after it are the draft, as far as the context reaches.

        max_ngram = 2    context  5 6 7 8 5 6 9 5 6    draft of 3: 7 8 5
                                  ---         ---      the 2-gram (5 6) occurs first at the beginning
    """
    empty = context[:0]
    if not len(context):
        return empty
    starts = np.flatnonzero(context[:-1] == context[-1]) + 1  # of drafts that follow a match of one token
    length = 1
    while len(starts) and length < max_ngram:
        longer = starts[starts > length]
        longer = longer[context[longer - length - 1] == context[-length - 1]]
        if not len(longer):
            break
        starts, length = longer, length + 1
    if not len(starts) or length < min_ngram:
        return empty
    start = int(starts[0])
    return context[start : start + num_tokens]


class NgramMatches(NamedTuple):
    """The drafts after every context tokens[:end] of a text: end = first, first + 1, ..., len(tokens) - 1."""

    starts: NDArray[np.int64]
    """Index in the text of the first draft token."""
    limits: NDArray[np.int64]
    """Maximum number of draft tokens, up to the end of the context; 0: no n-gram occurs earlier."""


def ngram_matches(tokens: Tokens, first: int, min_ngram: int, max_ngram: int) -> NgramMatches:
    """Finds the drafts of `ngram_draft` for all contexts of a text at once, which is much faster.

    Every n-gram gets a number (equal n-grams get equal numbers) from the number of its first n - 1 tokens and
    its last token; sorting them finds the earliest occurrence of each.
    """
    ends = np.arange(first, len(tokens))
    starts = np.zeros(len(ends), np.int64)
    if not len(ends):
        return NgramMatches(starts, starts)
    _, number_of_token = np.unique(tokens, return_inverse=True)
    numbers = number_of_token.astype(np.int64)  # of the n-gram that ends at each index, from index n - 1 on
    for length in range(1, max_ngram + 1):
        if length > 1:
            numbers = numbers[:-1] * (len(tokens) + 1) + number_of_token[length - 1 :]
        if not len(numbers):
            break
        _, earliest, numbers = np.unique(numbers, return_index=True, return_inverse=True)
        if len(earliest) == len(numbers):
            break  # all n-grams differ, and so do longer ones
        if length < min_ngram:
            continue
        last = ends - length  # the index in `numbers` of the n-gram at the end of each context
        known = np.flatnonzero(last >= 0)
        found = earliest[numbers[last[known]]]
        repeats = found < last[known]
        starts[known[repeats]] = found[repeats] + length
    return NgramMatches(starts, np.where(starts, ends - starts, 0))


SEPARATOR = -1
"""Separates two sequences of a text: no token has this id, so no match extends over it."""

_ROUNDING = 1e-6  # of max_spec_factor * m, as in Arctic Inference


class SuffixRules(NamedTuple):
    """The settings of suffix decoding, named as in vLLM."""

    max_tree_depth: int = 24
    """Maximum number of tokens of match plus draft."""
    max_spec_factor: float = 1.0
    """Maximum number of draft tokens per matched token."""
    min_token_prob: float = 0.1
    """Minimum probability of a draft token."""


class SuffixDraft(NamedTuple):
    """A draft and the sum of the probabilities of its tokens.

    Drafts by suffix decoding: the most frequent continuation of the latest tokens in a text.

    Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications", NeurIPS 2025,
    with the rules of Arctic Inference, which vLLM uses. For every number m of latest tokens that the text
    contains, the draft continues with the most frequent next token, then with the most frequent one after
    that, and so on. A token has the probability count(match and draft up to it) / count(match). A draft ends
    before a probability below min_token_prob, at max_spec_factor * m tokens, and where match and draft have
    max_tree_depth tokens. Of these drafts the one with the largest sum of probabilities is used; ties go to
    the longest match. A suffix tree stores these counts. Here they are counted in the list of a token's
    positions, because a tree of Python objects would need a hundred times the memory.
    """

    tokens: list[int]
    score: float


class Text:
    """Token ids of one or more concatenated sequences, with the positions of every token."""

    def __init__(self) -> None:
        self._tokens = array("q")
        self._ends: dict[int, array[int]] = {}  # token -> the indices after its occurrences, ascending

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: list[int]) -> None:
        """Appends tokens; SEPARATOR ends a sequence."""
        for end, token in enumerate(tokens, len(self._tokens) + 1):
            if token not in self._ends:
                self._ends[token] = array("q")
            self._ends[token].append(end)
        self._tokens.extend(tokens)

    def draft(
        self, context: list[int], num_tokens: int, rules: SuffixRules, begin: int = 0, end: int | None = None
    ) -> SuffixDraft:
        """Returns the draft of at most num_tokens tokens after a context, from the text [begin, end).

        The context counts as an occurrence of its own if the text ends with it.
        """
        context = context[-rules.max_tree_depth :]
        tokens = np.frombuffer(self._tokens, np.int64)[:end]

        def limit_of(length: int) -> int:
            limit = min(num_tokens, int(length * rules.max_spec_factor + _ROUNDING))
            return min(limit, rules.max_tree_depth - length)

        ends_of = dict(enumerate(self._matches(context, begin, len(tokens)), 1))
        best, best_length = SuffixDraft([], 0.0), 0
        for limit, length in sorted(((limit_of(length), length) for length in ends_of), reverse=True):
            if limit < best.score:
                break  # neither this nor later matches can reach this sum
            if limit == best.score and length < best_length:
                continue
            draft = _continuation(tokens, ends_of[length], limit, rules.min_token_prob)
            if (draft.score, length) > (best.score, best_length):
                best, best_length = draft, length
        return best

    def _matches(self, context: list[int], begin: int, end: int) -> Iterator[NDArray[np.int64]]:
        """Yields the ends of all occurrences in [begin, end) of the last 1, 2, ... tokens of a context.

        It stops when no token follows: the only remaining occurrence, also of all longer matches, is the end
        of the text.
        """
        occurrences = self._ends.get(context[-1]) if context else None
        if occurrences is None:
            return
        tokens = np.frombuffer(self._tokens, np.int64)
        ends = np.frombuffer(occurrences, np.int64)
        ends = ends[np.searchsorted(ends, begin, side="right") : np.searchsorted(ends, end, side="right")]
        for length in range(1, len(context)):
            if length > 1:
                ends = ends[ends >= begin + length]
                ends = ends[tokens[ends - length] == context[-length]]
            if not len(ends) or ends[0] == end:
                return
            yield ends


def _continuation(
    tokens: NDArray[np.int64], ends: NDArray[np.int64], limit: int, min_token_prob: float
) -> SuffixDraft:
    """Returns the most frequent tokens after matches that end before each of the indices `ends`."""
    found: list[int] = []
    probability, score = 1.0, 0.0
    while len(found) < limit:
        count = len(ends)
        ends = ends[ends < len(tokens)]
        after = tokens[ends]
        if (after == SEPARATOR).any():
            ends = ends[after != SEPARATOR]
            after = tokens[ends]
        if not len(after):
            break
        token, num_equal = _most_frequent(after)
        probability *= num_equal / count
        if probability < min_token_prob:
            break
        found.append(token)
        score += probability
        ends = ends[after == token] + 1
    return SuffixDraft(found, score)


def _most_frequent(tokens: NDArray[np.int64]) -> tuple[int, int]:
    """Returns the most frequent token and its count; tokens are in order of time.

    Ties go to the token that reached its count last, or to the first if each occurs once. This is the order
    in which Arctic Inference keeps the children of a node.
    """
    if len(tokens) == 1 or (tokens == tokens[0]).all():
        return int(tokens[0]), len(tokens)
    values, counts = np.unique(tokens, return_counts=True)
    most = int(counts.max())
    if most == 1:
        return int(tokens[0]), 1
    frequent = values[counts == most]
    if len(frequent) == 1:
        return int(frequent[0]), most
    last = np.flatnonzero(np.isin(tokens, frequent))[-1]
    return int(tokens[last]), most
