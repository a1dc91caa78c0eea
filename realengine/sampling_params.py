"""How one request wants its tokens drawn, in the names that users of serving engines know."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_LOGPROBS = 100
ALLOWED_LOGPROBS = f">= 0 and <= {MAX_LOGPROBS}, or None"


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Settings of one request; the defaults sample from the model's distribution as it is."""

    temperature: float = 1.0
    """0: greedy."""
    top_k: int = 0
    """0: all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    n: int = 1
    """Answers to draw; each has its own random numbers."""
    logprobs: int | None = None
    """Likeliest tokens to tell with their log-probabilities beside each token drawn; None: tell none."""
    max_tokens: int | None = 16
    """Output tokens at most; None: until the model's context is full."""
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = field(default=())
    """Tokens that end the answer besides the model's own; they are part of it."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer besides; its text ends before them, its tokens with the one that completes
    them."""
    seed: int | None = None
    """None: the engine's seed and the request's number decide."""

    def __post_init__(self) -> None:
        checks = (
            ("temperature", self.temperature >= 0, ">= 0; 0 for greedy"),
            ("top_k", self.top_k >= 0, ">= 0; 0 for all"),
            ("top_p", 0 < self.top_p <= 1, "> 0 and <= 1"),
            ("min_p", 0 <= self.min_p <= 1, ">= 0 and <= 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "> 0"),
            ("stop", _are_stops(self.stop), "a sequence of strings, none of them empty"),
            ("n", self.n >= 1, ">= 1"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, ALLOWED_LOGPROBS),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, ">= 1, or None"),
        )
        for name, holds, allowed in checks:
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)}: must be {allowed}")

    @property
    def has_penalties(self) -> bool:
        """Whether tokens seen so far change what is drawn."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


def _are_stops(stop: object) -> bool:
    return isinstance(stop, tuple | list) and all(isinstance(one, str) and one for one in stop)
