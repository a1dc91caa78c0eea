"""Proposers that draft on the host from token ids: prompt lookup, reference texts and suffix decoding."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from queue import Empty, SimpleQueue
from typing import Protocol, runtime_checkable

import numpy as np

from policies.speculation import Proposer
from policies.speculation.matching import SEPARATOR, SuffixRules, Text, Tokens, ngram_draft
from policies.speculation.proposers import Ngram, Suffix

MIN_TEXT = 1 << 16
"""Tokens of dropped answers that are kept at most, before the text of the answers is made anew."""


@runtime_checkable
class HostDrafter(Protocol):
    """Drafts the next tokens of requests from the tokens that the host has read."""

    def draft(
        self, request_id: int, prompt: SequenceOf[int], output: SequenceOf[int], num_tokens: int
    ) -> list[int]:
        """Returns at most num_tokens tokens that may follow the output so far; none if it finds none."""
        ...

    def forget(self, request_id: int, output: SequenceOf[int]) -> None:
        """Forgets a request that has ended with this output."""
        ...


def drafter_of(proposer: Proposer) -> HostDrafter | None:
    """Returns what drafts on the host for a proposer; None: it drafts on the device."""
    if isinstance(proposer, Ngram):
        return NgramDrafter(proposer)
    if isinstance(proposer, Suffix):
        return SuffixDrafter(proposer)
    return None


class Context:
    """The token ids of a growing text as an array."""

    def __init__(self, *parts: SequenceOf[int]) -> None:
        self._tokens = np.concatenate([np.asarray(part, np.int64) for part in parts])
        self._length = len(self._tokens)

    def extended(self, tokens: SequenceOf[int]) -> Tokens:
        """Appends tokens, and returns the whole text, which is valid until the next call."""
        end = self._length + len(tokens)
        if end > len(self._tokens):
            self._tokens = np.concatenate([self._tokens[: self._length], np.empty(end, np.int64)])
        self._tokens[self._length : end] = tokens
        self._length = end
        return self._tokens[:end]


class NgramDrafter:
    """Drafts what followed an earlier occurrence of the latest tokens, in a reference text or the request."""

    def __init__(self, proposer: Ngram) -> None:
        self._proposer = proposer
        self._contexts: dict[int, tuple[Context, int]] = {}  # with the number of output tokens that are in it

    def draft(
        self, request_id: int, prompt: SequenceOf[int], output: SequenceOf[int], num_tokens: int
    ) -> list[int]:
        """Returns the tokens after the earliest occurrence of the longest n-gram that ends the context."""
        context, num_known = self._contexts.get(request_id) or (Context(self._proposer.reference, prompt), 0)
        self._contexts[request_id] = context, len(output)
        tokens = context.extended(output[num_known:])
        proposer = self._proposer
        found = ngram_draft(tokens, proposer.min_ngram, proposer.prompt_lookup_max, num_tokens)
        drafted: list[int] = found.tolist()
        return drafted

    def forget(self, request_id: int, output: SequenceOf[int]) -> None:
        """Forgets a request."""
        self._contexts.pop(request_id, None)


class SuffixDrafter:
    """Drafts the most frequent continuation of the latest tokens, in the request and in earlier outputs."""

    def __init__(self, proposer: Suffix) -> None:
        self._rules = SuffixRules(
            proposer.suffix_decoding_max_tree_depth,
            proposer.suffix_decoding_max_spec_factor,
            proposer.suffix_decoding_min_token_prob,
        )
        self._max_outputs = proposer.suffix_decoding_max_cached_requests
        self._texts: dict[int, tuple[Text, int]] = {}  # with the number of output tokens that are in it
        self._outputs: deque[list[int]] = deque()
        self._earlier = Text()
        self._begin = 0  # of the outputs in _earlier that have not been dropped

    def draft(
        self, request_id: int, prompt: SequenceOf[int], output: SequenceOf[int], num_tokens: int
    ) -> list[int]:
        """Returns the better draft of those from the request's own tokens and from earlier outputs."""
        text, num_known = self._texts.get(request_id) or (Text(), 0)
        if not len(text):
            text.extend(list(prompt))
        text.extend(list(output[num_known:]))
        self._texts[request_id] = text, len(output)
        depth = self._rules.max_tree_depth
        context = [*prompt[-depth:], *output[-depth:]][-depth:]
        own = text.draft(context, num_tokens, self._rules)
        if not self._max_outputs:
            return own.tokens
        earlier = self._earlier.draft(context, num_tokens, self._rules, self._begin)
        return max(own, earlier, key=lambda found: found.score).tokens  # the first of equal ones

    def forget(self, request_id: int, output: SequenceOf[int]) -> None:
        """Forgets a request; its output is one of the earlier ones from now on."""
        self._texts.pop(request_id, None)
        if not self._max_outputs:
            return
        kept = [*output, SEPARATOR]
        self._outputs.append(kept)
        self._earlier.extend(kept)
        while len(self._outputs) > self._max_outputs:
            self._begin += len(self._outputs.popleft())
        if self._begin > max(MIN_TEXT, len(self._earlier) // 2):
            self._earlier, self._begin = Text(), 0
            for each in self._outputs:
                self._earlier.extend(each)


Call = Callable[[], list[int]]


class ProposerError(Exception):
    """A proposer has failed; the message says how, in one sentence."""


class Guarded:
    """Calls a drafter in a thread of its own, and checks what it returns.

    A call that does not return within timeout_s is abandoned with its thread, and the next one gets a new
    thread. vocab_size: upper bound of token ids.
    """

    def __init__(self, drafter: HostDrafter, timeout_s: float, vocab_size: int) -> None:
        self._drafter = drafter
        self._name = type(drafter).__name__
        self._timeout_s = timeout_s
        self._vocab_size = vocab_size
        self._calls: SimpleQueue[tuple[Call, SimpleQueue[list[int] | Exception]]] | None = None

    def draft(
        self, request_id: int, prompt: SequenceOf[int], output: SequenceOf[int], num_tokens: int
    ) -> list[int]:
        """Returns the drafter's tokens. Raises ProposerError if it fails, hangs, or returns anything else."""
        copied = list(prompt), list(output)
        found = self._called(lambda: self._drafter.draft(request_id, *copied, num_tokens))
        if not isinstance(found, list) or not all(isinstance(token, int) for token in found):
            raise ProposerError(f"{self._name}.draft returned {found!r:.100}: must be a list of token ids")
        if len(found) > num_tokens:
            raise ProposerError(
                f"{self._name}.draft returned {len(found)} tokens: must be at most num_tokens={num_tokens}"
            )
        wrong = next((token for token in found if not 0 <= token < self._vocab_size), None)
        if wrong is not None:
            raise ProposerError(
                f"{self._name}.draft returned token {wrong}: must be >= 0 and < {self._vocab_size}"
            )
        return found

    def forget(self, request_id: int, output: SequenceOf[int]) -> None:
        """Tells the drafter that a request has ended. Raises ProposerError as `draft` does."""
        copied = list(output)

        def call() -> list[int]:
            self._drafter.forget(request_id, copied)
            return []

        self._called(call)

    def _called(self, call: Call) -> list[int]:
        if self._calls is None:
            self._calls = SimpleQueue()
            threading.Thread(target=_serve, args=(self._calls,), daemon=True).start()
        answer: SimpleQueue[list[int] | Exception] = SimpleQueue()
        self._calls.put((call, answer))
        try:
            found = answer.get(timeout=self._timeout_s)
        except Empty:
            self._calls = None
            raise ProposerError(
                f"{self._name} has not returned within {self._timeout_s:g} s (host_timeout_s)"
            ) from None
        if isinstance(found, Exception):
            raise ProposerError(f"{self._name} raised {type(found).__name__}: {found}") from found
        return found


def _serve(calls: SimpleQueue[tuple[Call, SimpleQueue[list[int] | Exception]]]) -> None:
    """Answers calls until one of them never returns, or the program ends."""
    while True:
        call, answer = calls.get()
        try:
            answer.put(call())
        except Exception as error:  # the caller decides
            answer.put(error)
