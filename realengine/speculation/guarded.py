"""Calls a user's drafter so that its errors, and its silence, end only the request that it drafts for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from queue import Empty, SimpleQueue

from realengine.speculation.host import HostDrafter

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
