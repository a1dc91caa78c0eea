"""Drafts by matching token ids: prompt lookup, what followed the latest tokens when they occurred before.

As vLLM's ngram method: of the n-grams with min_ngram to max_ngram tokens at the end of the context, the
longest that occurs earlier in the context is taken, and of its occurrences the earliest. An occurrence may
overlap the end of the context. The tokens after it are the draft, as far as the context reaches.

    max_ngram = 2    context  5 6 7 8 5 6 9 5 6    draft of 3: 7 8 5
                              ---         ---      the 2-gram (5 6) occurs first at the beginning
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.integer]


def ngram_draft(context: Tokens, min_ngram: int, max_ngram: int, num_tokens: int) -> Tokens:
    """Returns the draft of at most num_tokens tokens after a context; empty if no n-gram occurs earlier."""
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
    """Number of tokens that a draft can have: up to the end of its context; 0: no n-gram occurs earlier."""


def ngram_matches(tokens: Tokens, first: int, min_ngram: int, max_ngram: int) -> NgramMatches:
    """Finds the drafts of `ngram_draft` for all contexts of a text at once, which is much faster.

    Every n-gram gets a number, the same for equal ones, from the numbers of its first n - 1 tokens and of its
    last one; sorting them finds the earliest occurrence of each.
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
