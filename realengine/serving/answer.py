"""A request to an engine, and what has come of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

from policies.core.request import Segment
from realengine.serving.sampling_params import SamplingParams
from realengine.serving.stop_strings import WatchedText


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of one drawn token, and of the likeliest ones: the model's own, before temperature and penalties."""

    logprob: float
    top: dict[int, float]
    """The likeliest first."""

    def top_of(self, num_tokens: int) -> TokenLogprobs:
        """With no more than so many of the likeliest."""
        if len(self.top) <= num_tokens:
            return self
        return TokenLogprobs(self.logprob, dict(islice(self.top.items(), num_tokens)))


@dataclass(slots=True)
class Output:
    """One answer to a request, as far as it has come. finish_reason: None until its end."""

    index: int
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    watched: WatchedText | None = None
    """Its text, if stop strings are looked for."""

    def end(self, reason: str) -> None:
        """No more tokens come."""
        self.finish_reason = reason
        if self.watched is not None:
            self.watched.finish()

    @property
    def text(self) -> str | None:
        """Up to a stop string, where any are looked for; else None: its tokens are all there is to tell."""
        return None if self.watched is None else self.watched.text


@dataclass(slots=True)
class Answer:
    """One request and what has come of it so far: `params.n` outputs. error: why it ended with none."""

    request_id: int
    prompt_tokens: list[int]
    params: SamplingParams
    outputs: list[Output]
    lora: str | None = None
    error: str | None = None
    segments: tuple[Segment, ...] = ()
    answer_id: int = 0
    stop_tokens: frozenset[int] = frozenset()
    alive: list[Output] = field(default_factory=list)
    """By branch: those that go on."""

    def end(self, reason: str) -> None:
        """Whatever has not ended yet ends."""
        for output in self.alive:
            if output.finish_reason is None:
                output.end(reason)
        self.alive = []

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come."""
        return not self.alive
