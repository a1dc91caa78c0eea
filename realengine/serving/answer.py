"""A request to an engine, and its outputs so far."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import islice

from policies.core.request import Segment
from realengine.serving.forms import Form
from realengine.serving.sampling_params import SamplingParams
from realengine.serving.stop_strings import WatchedText


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one drawn token and of the most likely ones, before temperature and penalties."""

    logprob: float
    top: dict[int, float]
    """Log-probabilities by token, the most likely first."""

    def top_of(self, num_tokens: int) -> TokenLogprobs:
        """Returns these log-probabilities with at most num_tokens of the most likely tokens."""
        if len(self.top) <= num_tokens:
            return self
        return TokenLogprobs(self.logprob, dict(islice(self.top.items(), num_tokens)))


@dataclass(slots=True)
class DraftCounts:
    """Draft tokens of one request, counted as in vLLM's metrics."""

    num_accepted_per_pos: list[int]
    """Passes that accepted the draft token of a place; place 0 is the first draft token of a pass."""
    num_drafts: int = 0
    """Passes with at least one draft token."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def add(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Counts a pass."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted
        for place in range(num_accepted):
            self.num_accepted_per_pos[place] += 1

    @property
    def mean_accepted_length(self) -> float:
        """Mean tokens of a pass with draft tokens: 1 + accepted tokens / passes; 1 without any."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0


@dataclass(slots=True)
class Output:
    """One output of a request, as far as it has been generated. finish_reason: None until its end."""

    index: int
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """Stop string or token of `stop_token_ids` that has ended the output."""
    logprobs: list[TokenLogprobs] | None = None
    watched: WatchedText | None = None
    """Text of the output, if the request has stop strings."""
    form: Form | None = None
    """Says which tokens may come next; None: all."""

    def end(self, reason: str) -> None:
        """Ends the output; no more tokens follow."""
        self.finish_reason = reason
        if self.watched is not None:
            self.watched.finish()

    @property
    def text(self) -> str | None:
        """Text up to a stop string if the request has stop strings, otherwise None."""
        return None if self.watched is None else self.watched.text


@dataclass(slots=True)
class Answer:
    """One request and its outputs so far, `params.n` of them. error: why it ended without an output."""

    request_id: int
    prompt_tokens: list[int]
    params: SamplingParams
    outputs: list[Output]
    lora: str | None = None
    error: str | None = None
    segments: tuple[Segment, ...] = ()
    answer_id: int = 0
    stop_tokens: Collection[int] = frozenset()
    """Tokens after which `ends` is asked."""
    alive: list[Output] = field(default_factory=list)
    """Outputs that have not ended, by branch."""
    drafts: DraftCounts | None = None
    """Counts of draft tokens; None: no pass had any."""
    cache_salt: str = ""
    num_cached_tokens: int = 0
    """Tokens of the prompt whose KV was found in the cache when the request was first admitted."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Log-probabilities of the prompt's tokens, if they are wanted; that of the first one is None.

    They are complete once the first token of an output is there, and None so far as not computed.
    """

    def ends(self, output: Output) -> bool:
        """Ends an output if its newest token or a stop string in its text does; returns whether it has ended.

        Called for each token of `stop_tokens`, and for each token of an output that is watched.
        """
        token, watched = output.tokens[-1], output.watched
        may_end = len(output.tokens) > self.params.min_tokens
        if watched is not None and watched.add(token, may_end=may_end):
            output.stop_reason = watched.found
        elif token not in self.stop_tokens or not may_end:
            return False
        elif token in self.params.stop_token_ids:
            output.stop_reason = token
        output.end("stop")
        return True

    def resume(self, known: Output) -> int:
        """Lets the only output go on after the tokens of another engine; returns their number."""
        [output] = self.outputs
        output.tokens += known.tokens
        if output.logprobs is not None and known.logprobs is not None:
            output.logprobs += known.logprobs
        if output.watched is not None:
            for number, token in enumerate(known.tokens, 1):
                output.watched.add(token, may_end=number > self.params.min_tokens)
        return len(known.tokens)

    def remaining(self) -> tuple[int, ...]:
        """Returns the branches that go on after a step in which `ends` was true."""
        return tuple(branch for branch, output in enumerate(self.alive) if not output.finish_reason)

    def keep(self, branches: tuple[int, ...]) -> list[int]:
        """Goes on with these branches as the first ones; returns those of them that have other tokens now."""
        self.alive = [self.alive[branch] for branch in branches]
        return [branch for branch, before in enumerate(branches) if branch != before]

    def end(self, reason: str) -> None:
        """Ends all outputs that have not ended yet."""
        for output in self.alive:
            if output.finish_reason is None:
                output.end(reason)
        self.alive = []

    @property
    def is_finished(self) -> bool:
        """True if all outputs have ended."""
        return not self.alive
