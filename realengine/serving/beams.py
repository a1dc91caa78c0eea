"""Beam search: hypotheses of one prompt, of which each step keeps the likeliest.

The hypotheses are the branches of one sequence (`Branching(width, every=1)`), as in the simulator: they share
KV blocks by reference, copy them on write, and are preempted together. A step draws nothing: it reports the
likeliest next tokens of each branch, from which `BeamAnswer` chooses the next hypotheses and their parents.

The rules are those of vLLM's `beam_search`: the candidates of a hypothesis are its 2 * beam_width likeliest
tokens (more if the model has more than beam_width end-of-sequence tokens); a candidate that ends with such a
token is complete; the beam_width likeliest others go on until max_tokens. The results have the beam_width
best scores: log-probability / length ** length_penalty, where the length counts the prompt, and not the
end-of-sequence token. The search ends before max_tokens only if no continuation can be among the results.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from heapq import nlargest
from math import inf

from policies.core.request import Branching
from realengine.serving.answer import Answer, Output
from realengine.serving.sampling_params import MAX_LOGPROBS, SamplingParams, is_number, is_whole

MAX_LENGTH_PENALTY = 20
"""Largest exponent of a length; those of long contexts would overflow with larger ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BeamSearchParams:
    """Settings of a beam search, with vLLM's names."""

    beam_width: int
    """Number of hypotheses that are kept in each step, and of results."""
    max_tokens: int = 16
    """Maximum number of output tokens."""
    ignore_eos: bool = False
    temperature: float = 0.0
    """Must be 0: hypotheses are compared by the model's own log-probabilities."""
    length_penalty: float = 1.0
    """Exponent of the length by which a log-probability is divided; larger values prefer longer outputs."""

    def __post_init__(self) -> None:
        width, most = self.beam_width, MAX_LOGPROBS // 2
        checks = (
            (
                "beam_width",
                is_whole(width) and 1 <= width <= most,
                f"a whole number >= 1 and <= {most}",
            ),
            ("max_tokens", is_whole(self.max_tokens) and self.max_tokens >= 1, "a whole number >= 1"),
            ("ignore_eos", isinstance(self.ignore_eos, bool), "true or false"),
            ("temperature", self.temperature == 0, "0, because a beam search draws nothing at random"),
            (
                "length_penalty",
                is_number(self.length_penalty) and abs(self.length_penalty) <= MAX_LENGTH_PENALTY,
                f"a number >= -{MAX_LENGTH_PENALTY} and <= {MAX_LENGTH_PENALTY}",
            ),
        )
        for name, holds, allowed in checks:
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be {allowed}")

    def sampling(self, vocab_size: int, eos_token_ids: Collection[int]) -> BeamSampling:
        """Returns the parameters of the request for a model with this vocabulary."""
        num_ends = 0 if self.ignore_eos else len(eos_token_ids)
        num_candidates = min(vocab_size, max(2 * self.beam_width, self.beam_width + num_ends), MAX_LOGPROBS)
        return BeamSampling(
            temperature=0,
            n=self.beam_width,
            max_tokens=self.max_tokens,
            logprobs=num_candidates,
            ignore_eos=self.ignore_eos,
            length_penalty=float(self.length_penalty),
            vocab_size=vocab_size,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BeamSampling(SamplingParams):
    """Parameters of a request whose n outputs are the hypotheses of a beam search."""

    length_penalty: float
    vocab_size: int

    @property
    def branching(self) -> Branching:
        """Branches that are chosen anew after each token."""
        return Branching(self.n, every=1)


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One result: the prompt's tokens and the output's, and the output's text and summed log-probability."""

    tokens: tuple[int, ...]
    text: str
    cum_logprob: float
    finish_reason: str


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The results of one prompt, the best first."""

    sequences: tuple[BeamSearchSequence, ...]


@dataclass(slots=True)
class Hypothesis(Output):
    """One hypothesis: its tokens and the sum of their log-probabilities.

    A sum of -inf fills a beam with fewer hypotheses than its width.
    """

    cum_logprob: float = 0.0

    def with_token(self, token: int, logprob: float) -> Hypothesis:
        """Returns the hypothesis with another newest token than the one that its branch has drawn."""
        return Hypothesis(0, [*self.tokens[:-1], token], logprobs=[], cum_logprob=self.cum_logprob + logprob)


@dataclass(slots=True)
class BeamAnswer(Answer):
    """A beam search so far: `alive` are the hypotheses that go on, `outputs` at the end the best results."""

    eos_token_ids: frozenset[int] = frozenset()
    complete: list[Hypothesis] = field(default_factory=list)
    """The best hypotheses that have ended, at most as many as results, the best first."""
    chosen: list[Hypothesis] = field(default_factory=list)
    """The hypotheses that go on after a step that is not committed yet."""

    @classmethod
    def of(cls, answer: Answer, eos_token_ids: frozenset[int]) -> BeamAnswer:
        """Returns the search of an empty answer, of which each branch has drawn nothing yet."""
        assert isinstance(answer.params, BeamSampling)
        search = cls(
            answer.request_id,
            answer.prompt_tokens,
            answer.params,
            answer.outputs,
            answer.lora,
            stop_tokens=range(answer.params.vocab_size),  # each token decides which branches go on
            cache_salt=answer.cache_salt,
            eos_token_ids=frozenset() if answer.params.ignore_eos else eos_token_ids,
        )
        search.chosen = [Hypothesis(0, logprobs=[], cum_logprob=-inf) for _ in answer.outputs]
        search.chosen[0].cum_logprob = 0.0
        search.keep(tuple(range(len(search.chosen))))
        return search

    def ends(self, output: Output) -> bool:
        """Returns true: after every token it must be asked which branches go on."""
        return True

    def remaining(self) -> tuple[int, ...]:
        """Chooses the next hypotheses; returns the branches that they continue, none after the end."""
        found: list[tuple[int, Hypothesis]] = []
        for branch, hypothesis in enumerate(self.alive):
            assert isinstance(hypothesis, Hypothesis)
            assert hypothesis.logprobs is not None
            for token, logprob in hypothesis.logprobs[-1].top.items():
                longer = hypothesis.with_token(token, logprob)
                if token not in self.eos_token_ids:
                    found.append((branch, longer))
                elif longer.cum_logprob > -inf:
                    longer.finish_reason = "stop"
                    self.complete.append(longer)
        width = self.params.n
        self.complete = nlargest(width, self.complete, key=self.score)
        best = nlargest(width, found, key=lambda each: each[1].cum_logprob)
        worst = self.score(self.complete[-1]) if len(self.complete) == width else -inf
        if all(self._best_score(longer) <= worst for _, longer in best):
            self.chosen = []
            return ()
        self.chosen = [longer for _, longer in best]
        return tuple(branch for branch, _ in best)

    def keep(self, branches: tuple[int, ...]) -> list[int]:
        """Goes on with the chosen hypotheses; returns the branches whose newest token changes: all."""
        self.outputs = list(self.chosen)
        self.alive = list(self.chosen)
        for branch, hypothesis in enumerate(self.chosen):
            hypothesis.index = branch
        return list(range(len(branches)))

    def end(self, reason: str) -> None:
        """Ends the search; unless it was cut off, the best hypotheses are its results."""
        if reason in ("stop", "length"):
            longest = [hypothesis for hypothesis in self.chosen if hypothesis.cum_logprob > -inf]
            for hypothesis in longest:
                hypothesis.finish_reason = "length"
            results = nlargest(self.params.n, [*self.complete, *longest], key=self.score)
            for place, hypothesis in enumerate(results):
                hypothesis.index = place
            self.outputs = list(results)
            self.alive = []
        Answer.end(self, reason)

    def score(self, hypothesis: Hypothesis) -> float:
        """Returns the score by which results are compared."""
        num_tokens = len(hypothesis.tokens) - (hypothesis.finish_reason == "stop")
        return self._score(hypothesis.cum_logprob, num_tokens)

    def _best_score(self, hypothesis: Hypothesis) -> float:
        """Returns an upper bound of the score of all continuations, whose log-probability can only sink."""
        assert self.params.max_tokens is not None
        lengths = len(hypothesis.tokens), self.params.max_tokens
        return max(self._score(hypothesis.cum_logprob, num_tokens) for num_tokens in lengths)

    def _score(self, cum_logprob: float, num_tokens: int) -> float:
        assert isinstance(self.params, BeamSampling)
        penalty: float = (len(self.prompt_tokens) + num_tokens) ** self.params.length_penalty
        return cum_logprob / penalty
