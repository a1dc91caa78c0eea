"""Texts of simulated outputs: words drawn at random, an echo of the prompt, or the texts of a file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from math import log
from pathlib import Path
from random import Random
from typing import Literal

from experiments.serve.backend import Tokenizer, TokenLogprob
from experiments.serve.simulated.dataset import read_texts

Text = Literal["random", "echo", "dataset"]

WORDS = (  # a string, as a list would have a line per word
    "the and of to in is that it was for on are as with his they at be this have from or one had by but not "
    "what all were we when your can said there use an each which she do how their if will up other about "
    "out many then them these so some her would make like him into time has look two more go see no way "
    "could my than first been call its now find long down day did get come made may part"
)
MIN_WORDS, MAX_WORDS = 50, 2000


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole output: its tokens, the text of each, and what ends it. logprob: of every token."""

    token_ids: Sequence[int]
    texts: Sequence[str]
    finish_reason: str
    stop_reason: str | None = None
    logprob: float = 0.0
    others: Sequence[int] = ()
    """Tokens that are as likely as each of the output's own."""

    def logprobs(self, start: int, end: int, num_top: int) -> tuple[TokenLogprob, ...]:
        """Returns the log-probabilities of the tokens from start to end."""
        return tuple(self._logprobs_of(token, num_top) for token in self.token_ids[start:end])

    def _logprobs_of(self, token: int, num_top: int) -> TokenLogprob:
        likely = [token, *(other for other in self.others if other != token)]
        return TokenLogprob(token, self.logprob, tuple((each, self.logprob) for each in likely[:num_top]))


class Answers:
    """Writes the outputs of a run. dataset: JSON lines with a key `text` or `output`, for kind "dataset".

    Raises ValueError for a file that cannot be read.
    """

    def __init__(self, kind: Text, tokenizer: Tokenizer, seed: int, dataset: Path | None = None) -> None:
        self._kind = kind
        self._tokenizer = tokenizer
        self._seed = seed
        self._words = _words_of(tokenizer)
        self._texts = cycle(read_texts(dataset)) if kind == "dataset" else None

    def write(
        self,
        request_id: int,
        prompt: Sequence[int],
        num_tokens: int,
        *,
        ends: bool,
        seed: int | None,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> Answer:
        """Returns an output of num_tokens tokens, or shorter if a stop string occurs after min_tokens.

        ends: whether it ends by itself there; otherwise a limit ends it. seed: of the request.
        """
        reason = "stop" if ends else "length"
        answer = self._random(request_id, num_tokens, seed, reason)
        if self._kind != "random":
            source = prompt if self._texts is None else self._tokenizer.encode(next(self._texts))
            tokens = list(islice(cycle(source or answer.token_ids), num_tokens))
            answer = Answer(tokens, _pieces(self._tokenizer, tokens), reason)
        return _stopped(answer, stop, min_tokens) if stop else answer

    def _random(self, request_id: int, num_tokens: int, seed: int | None, reason: str) -> Answer:
        draws = Random(f"{self._seed} {request_id}" if seed is None else f"seed {seed}")
        words = self._words
        drawn = draws.choices(list(words), k=num_tokens)
        likely = list(islice(words, 32))
        return Answer(drawn, [words[token] for token in drawn], reason, None, -log(len(words)), likely)


def _words_of(tokenizer: Tokenizer) -> dict[int, str]:
    """Returns words of one token each, with a space before them."""
    found: dict[int, str] = {}
    for word in WORDS.split():
        tokens = tokenizer.encode(f" {word}", add_special_tokens=False)
        if len(tokens) == 1:
            found[tokens[0]] = f" {word}"
    for token in range(min(tokenizer.vocab_size, 50_000) if len(found) < MIN_WORDS else 0):
        text = tokenizer.decode([token])
        if len(found) < MAX_WORDS and re.fullmatch(r" ?[a-zA-Z]+", text):
            found[token] = text
    return found or {0: tokenizer.decode([0])}


def _pieces(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """Returns the text that each token adds; the last token of a character adds it."""
    pieces, pending = [], list[int]()
    for token in token_ids:
        pending.append(token)
        text = tokenizer.decode(pending)
        if text.endswith("\ufffd") and len(pending) < 4:
            pieces.append("")
            continue
        pieces.append(text)
        pending.clear()
    if pending:
        pieces[-1] = tokenizer.decode(pending)
    return pieces


def _stopped(answer: Answer, stop: Sequence[str], min_tokens: int) -> Answer:
    """Returns the output up to the first stop string, which is not part of the text."""
    text, longest = "", max(map(len, stop))
    for place, piece in enumerate(answer.texts):
        start = max(0, len(text) - longest + 1)
        text += piece
        found = [(text.find(each, start), each) for each in stop if each in text[start:]]
        if found and place + 1 > min_tokens:
            at, stopped_by = min(found)
            return Answer(
                answer.token_ids[: place + 1],
                _cut(answer.texts[: place + 1], at),
                "stop",
                stopped_by,
                answer.logprob,
                answer.others,
            )
    return answer


def _cut(texts: Sequence[str], num_chars: int) -> list[str]:
    """Returns the texts, cut after num_chars characters in all."""
    kept = []
    for text in texts:
        kept.append(text[:num_chars])
        num_chars -= len(kept[-1])
    return kept
