"""Sampling parameters of one request, with the names of common serving engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite

import numpy as np

from policies.core.request import Branching
from realengine.serving.forms import StructuredOutputs

MAX_LOGPROBS = 100
MAX_N = 1024  # more than the slots of any engine
MAX_BIASES = 1024
MAX_BIAS = 100.0
ALLOWED_LOGPROBS = f"a whole number >= 0 and <= {MAX_LOGPROBS}, or None"


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Settings of one request; the defaults sample from the unchanged distribution of the model."""

    temperature: float = 1.0
    """Sampling temperature; 0: greedy."""
    top_k: int = 0
    """Number of most likely tokens that are sampled from; 0: all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    n: int = 1
    """Number of outputs; each has its own random numbers."""
    logprobs: int | None = None
    """Number of most likely tokens to report with log-probabilities beside each drawn token; None: none."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens to report beside each token of the prompt; None: none.

    The request then computes all of its prompt, and reads no KV of the prefix cache.
    """
    max_tokens: int | None = 16
    """Maximum number of output tokens of each output; None: until the model's context is full.

    Several outputs together are also limited by the size of the KV cache.
    """
    min_tokens: int = 0
    """Output tokens before which no end-of-sequence token, stop token or stop string ends the output.

    Tokens that would end it are not drawn before.
    """
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = field(default=())
    """Tokens that end the output in addition to the model's own; they are part of it."""
    stop: tuple[str, ...] = ()
    """Strings that also end the output.

    Its text ends before the string, its tokens with the one that completes it.
    """
    logit_bias: Mapping[int, float] | None = None
    """Numbers, from -100 to 100, that are added to the logits of tokens before they are drawn."""
    structured_outputs: StructuredOutputs | None = None
    """The form that each output has, unless max_tokens cuts it; None: any."""
    seed: int | None = None
    """Seed of the random numbers; None: derived from the engine's seed and the request's number."""

    def __post_init__(self) -> None:
        checks = (
            ("temperature", is_number(self.temperature) and self.temperature >= 0, ">= 0; 0 for greedy"),
            ("top_k", is_whole(self.top_k) and 0 <= self.top_k < 1 << 31, "a whole number >= 0; 0 for all"),
            ("top_p", is_number(self.top_p) and 0 < self.top_p <= 1, "> 0 and <= 1"),
            ("min_p", is_number(self.min_p) and 0 <= self.min_p <= 1, ">= 0 and <= 1"),
            (
                "repetition_penalty",
                is_number(self.repetition_penalty) and self.repetition_penalty > 0,
                "a number > 0",
            ),
            ("presence_penalty", is_number(self.presence_penalty), "a number"),
            ("frequency_penalty", is_number(self.frequency_penalty), "a number"),
            ("n", is_whole(self.n) and 1 <= self.n <= MAX_N, f"a whole number >= 1 and <= {MAX_N}"),
            ("logprobs", _are_logprobs(self.logprobs), ALLOWED_LOGPROBS),
            ("prompt_logprobs", _are_logprobs(self.prompt_logprobs), ALLOWED_LOGPROBS),
            (
                "max_tokens",
                self.max_tokens is None or (is_whole(self.max_tokens) and self.max_tokens >= 1),
                "a whole number >= 1, or None",
            ),
            (
                "min_tokens",
                is_whole(self.min_tokens) and 0 <= self.min_tokens <= (self.max_tokens or self.min_tokens),
                "a whole number >= 0 and <= max_tokens",
            ),
            ("stop_token_ids", are_whole(self.stop_token_ids), "a sequence of token ids"),
            ("stop", _are_stops(self.stop), "a sequence of strings, none of them empty"),
            (
                "logit_bias",
                self.logit_bias is None or _are_biases(self.logit_bias),
                f"at most {MAX_BIASES} numbers >= -{MAX_BIAS} and <= {MAX_BIAS}, by token id",
            ),
            (
                "structured_outputs",
                self.structured_outputs is None or isinstance(self.structured_outputs, StructuredOutputs),
                "StructuredOutputs, or None",
            ),
            (
                "min_tokens",
                not self.min_tokens or self.structured_outputs is None,
                "0 with structured_outputs, as an output ends where its form does",
            ),
            ("seed", self.seed is None or _is_seed(self.seed), "a whole number of 64 bits, or None"),
        )
        for name, holds, allowed in checks:
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be {allowed}")

    @property
    def branching(self) -> Branching | None:
        """Branches of the request; None: it has one output."""
        return Branching(self.n) if self.n > 1 else None

    @property
    def has_penalties(self) -> bool:
        """True if tokens seen so far change the distribution."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


def is_whole(value: object) -> bool:
    """Returns whether a value is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Returns whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _is_seed(value: object) -> bool:
    return isinstance(value, int) and -(1 << 63) <= value < 1 << 64


def _are_logprobs(value: object) -> bool:
    return value is None or (isinstance(value, int) and is_whole(value) and 0 <= value <= MAX_LOGPROBS)


def are_whole(values: object) -> bool:
    """Returns whether a value is a list or tuple of whole numbers."""
    return isinstance(values, tuple | list) and all(is_whole(value) for value in values)


def _are_stops(stop: object) -> bool:
    return isinstance(stop, tuple | list) and all(isinstance(one, str) and one for one in stop)


def _are_biases(biases: object) -> bool:
    return (
        isinstance(biases, Mapping)
        and len(biases) <= MAX_BIASES
        and all(is_whole(token) and token >= 0 for token in biases)
        and all(is_number(value) and abs(value) <= MAX_BIAS for value in biases.values())
    )


def check_vocabulary(prompt_tokens: list[int], params: SamplingParams, vocab_size: int) -> None:
    """Raises ValueError if a prompt's token, or the number of logprobs, is outside the vocabulary."""
    for place, token in enumerate(prompt_tokens):
        if not isinstance(token, int | np.integer) or not 0 <= token < vocab_size:
            raise ValueError(f"prompt token {place} is {token}: must be >= 0 and < {vocab_size}")
    for token in params.logit_bias or ():
        if token >= vocab_size:
            raise ValueError(f"logit_bias: token {token} must be < {vocab_size}, the size of the vocabulary")
    for name in ("logprobs", "prompt_logprobs"):
        number = getattr(params, name)
        if number is not None and number > vocab_size:
            raise ValueError(f"{name}={number}: must be <= {vocab_size}, the size of the vocabulary")
