"""Builds what a consumer reads of a request, from its states and its answer: tokens, text, logprobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Protocol

from realengine.serving.answer import Answer, TokenLogprobs
from realengine.serving.engine_thread import End, State
from realengine.serving.llm import CompletionOutput, RequestOutput
from realengine.serving.sampling_params import SamplingParams
from realengine.serving.tokenizer import Detokenizer, Tokenizer


class Readable(Protocol):
    """A request whose outputs are read."""

    tokens: list[int]
    params: SamplingParams
    request_id: int | str
    state: State

    @property
    def answer(self) -> Answer | None:
        """The outputs so far, whose lists only grow; None: it has not reached an engine."""
        ...


class OutputReader:
    """Builds a request's outputs from its states, in the consumer's thread."""

    def __init__(
        self,
        stream: Readable,
        prompt: str | None,
        tokenizer: Tokenizer | None,
        eos_token_ids: Sequence[int],
        is_delta: bool,
    ) -> None:
        self._stream = stream
        self._prompt = prompt
        self._is_delta = is_delta
        self._prompt_token_ids = tuple(stream.tokens)
        self._texts = [_OutputText(tokenizer, eos_token_ids) for _ in range(stream.params.n)]
        self._last = stream.state

    def has_news(self, state: State) -> bool:
        """Returns whether a state has more than the last one that was read."""
        return state != self._last

    def read(self, state: State) -> RequestOutput:
        """Returns the outputs up to a state."""
        outputs = []
        # A beam search may end with fewer outputs than it has hypotheses.
        for index, (last, end) in enumerate(zip(self._last.ends, state.ends, strict=False)):
            outputs.append(self._completion(index, last, end))
        self._last = state
        answer = self._stream.answer
        return RequestOutput(
            self._stream.request_id,
            self._prompt,
            self._prompt_token_ids,
            tuple(outputs),
            state.error,
            None if answer is None else deepcopy(answer.drafts),
            0 if answer is None else answer.num_cached_tokens,
            None if answer is None else answer.prompt_logprobs,
        )

    def _completion(self, index: int, last: End, now: End) -> CompletionOutput:
        """Returns an output's current state, given the state up to which it was reported."""
        start, end, reason = last.num_tokens, now.num_tokens, now.finish_reason
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] | None = None if self._stream.params.logprobs is None else []
        stop_reason = None
        if self._stream.answer is not None:
            output = self._stream.answer.outputs[index]
            tokens, logprobs, stop_reason = output.tokens, output.logprobs, output.stop_reason
        if now.text is not None:
            whole, piece = now.text, now.text[len(last.text or "") :]
        else:
            piece = self._texts[index].add(tokens[start:end], reason is not None)
            whole = self._texts[index].whole
        shown = slice(start if self._is_delta else 0, end)
        return CompletionOutput(
            index,
            piece if self._is_delta else whole,
            tuple(tokens[shown]),
            reason,
            None if logprobs is None else tuple(logprobs[shown]),
            None if reason is None else stop_reason,
        )


class _OutputText:
    """Text of one output as its tokens come; empty without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, eos_token_ids: Sequence[int]) -> None:
        self.whole = ""
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._eos_token_ids = eos_token_ids

    def add(self, tokens: Iterable[int], is_finished: bool) -> str:
        """Adds tokens; returns the text that they complete."""
        if self._detokenizer is None:
            return ""
        pieces = [self._detokenizer.add(token) for token in tokens if token not in self._eos_token_ids]
        if is_finished:
            pieces.append(self._detokenizer.finish())
        piece = "".join(pieces)
        self.whole += piece
        return piece
