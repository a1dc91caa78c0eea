"""Appends the tokens of a launch to the outputs of its rows.

In most decode steps the rows are those of the step before, and each gets one token (`RepeatedRows`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from policies.core.sequence import Sequence
from realengine.runner.launch import Row
from realengine.runner.prompt_scores import ScoredChunk
from realengine.serving.answer import Answer, TokenLogprobs


class Appended(NamedTuple):
    """The answers that got tokens, how many each, and by sequence those with outputs that have ended."""

    answers: list[Answer]
    counts: list[int]
    stopped: dict[Sequence, Answer]


def append_tokens(
    rows: list[Row],
    columns: list[list[int]],
    logprobs: list[list[TokenLogprobs]] | None,
    answer_of: Mapping[Sequence, Answer],
    prompts: list[tuple[ScoredChunk, list[TokenLogprobs]]],
) -> Appended:
    """Appends the tokens of each row, up to the one that ends its output, and their log-probabilities.

    prompts: log-probabilities of tokens of prompts, which are put into their answers.
    """
    for (seq, first, num_tokens), found in prompts:
        scored = answer_of.get(seq)
        if scored is not None and scored.prompt_logprobs is not None:
            num_top = scored.params.prompt_logprobs or 0
            scored.prompt_logprobs[first : first + num_tokens] = [each.top_of(num_top) for each in found]
    appended = Appended([], [], {})
    for place, ((seq, branch), tokens) in enumerate(zip(rows, columns, strict=True)):
        answer = answer_of.get(seq)
        if answer is None:
            continue  # aborted, or it had ended before this launch
        if not branch:
            appended.answers.append(answer)
            appended.counts.append(len(tokens))
        output = answer.alive[branch]
        for token in tokens:
            output.tokens.append(token)
            if (token in answer.stop_tokens or output.watched is not None) and answer.ends(output):
                appended.stopped[seq] = answer
                break
        if logprobs is not None and output.logprobs is not None:
            num_new = len(output.tokens) - len(output.logprobs)
            num_top = answer.params.logprobs or 0
            output.logprobs += [each.top_of(num_top) for each in logprobs[place][:num_new]]
    return appended


class RepeatedRows:
    """The answers of rows with one output each, without stop strings or logprobs, until one of them ends."""

    def __init__(self, rows: list[Row], answers: list[Answer]) -> None:
        self.rows = rows
        self._answers = answers
        self._appends: list[Callable[[int], None]] = [answer.alive[0].tokens.append for answer in answers]
        self._stops = frozenset[int]().union(*{answer.stop_tokens for answer in answers})

    @classmethod
    def of(cls, rows: list[Row], answer_of: Mapping[Sequence, Answer]) -> RepeatedRows | None:
        """Returns the answers of rows; None if there is one that needs more than its tokens."""
        answers = []
        for seq, branch in rows:
            answer = answer_of.get(seq)
            if answer is None or branch or len(answer.outputs) > 1:
                return None
            output = answer.alive[0]
            if output.watched is not None or output.logprobs is not None:
                return None
            answers.append(answer)
        return cls(rows, answers)

    def append(self, tokens: list[int]) -> Appended:
        """Appends a token to each output."""
        for append, token in zip(self._appends, tokens, strict=True):
            append(token)
        stopped = {}
        if not self._stops.isdisjoint(tokens):
            for (seq, _), answer, token in zip(self.rows, self._answers, tokens, strict=True):
                if token in answer.stop_tokens and answer.ends(answer.alive[0]):
                    stopped[seq] = answer
        return Appended(list(self._answers), [1] * len(tokens), stopped)
