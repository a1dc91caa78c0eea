"""Outputs of a simulated fleet: their lengths, and their texts.

A text is words drawn at random, an echo of the prompt, or one of a file. A length is what the request asks
for, within what the workload would generate.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, count, cycle, islice, repeat
from math import log
from pathlib import Path
from random import Random
from typing import Literal, NamedTuple

from experiments.serve.backend import Sampling, Structure, Tokenizer, TokenLogprob
from experiments.serve.errors import ApiError
from experiments.serve.simulated.structured import structured_text
from hwmodels.checks import UnreadableFileError, read_text
from sim.workload.base import Workload

Text = Literal["random", "echo", "dataset"]
OutputLength = Literal["workload", "max_tokens"]

WORDS = (  # a string, as a list would have a line per word
    "the and of to in is that it was for on are as with his they at be this have from or one had by but not "
    "what all were we when your can said there use an each which she do how their if will up other about "
    "out many then them these so some her would make like him into time has look two more go see no way "
    "could my than first been call its now find long down day did get come made may part"
)
MIN_WORDS, MAX_WORDS = 50, 2000
DRAWN_TOGETHER = 32
LONG_TOKENS = 2000

Piece = tuple[int, str]
"""A token and the text that it adds."""


class Answer:
    """A whole output: its tokens, the text of each, and what ends it.

    Tokens are drawn when they are first read, as clients ask for outputs that they never read to the end.
    pieces: (token, text) of each token, num_tokens or more. logprob: of every token. others: tokens that are
    as likely as each of the output's own.
    """

    def __init__(
        self,
        pieces: Iterable[Piece],
        num_tokens: int,
        finish_reason: str,
        stop_reason: str | None = None,
        *,
        logprob: float = 0.0,
        others: Sequence[int] = (),
    ) -> None:
        self._pieces = iter(pieces)
        self._drawn: list[Piece] = []
        self.num_tokens = num_tokens
        self.finish_reason = finish_reason
        self.stop_reason = stop_reason
        self.logprob = logprob
        self.others = others

    def token_ids(self, start: int, end: int) -> tuple[int, ...]:
        """Returns the tokens from start to end, all of which the output has."""
        return tuple([token for token, _ in self._read(start, end)])

    def text(self, start: int, end: int) -> str:
        """Returns the text of the tokens from start to end."""
        return "".join([text for _, text in self._read(start, end)])

    def logprobs(self, start: int, end: int, num_top: int) -> tuple[TokenLogprob, ...]:
        """Returns the log-probabilities of the tokens from start to end."""
        return tuple(self._logprobs_of(token, num_top) for token, _ in self._read(start, end))

    async def stopped(self, stop: Sequence[str], min_tokens: int) -> Answer:
        """Returns the output up to the first stop string after min_tokens; the string is not in its text.

        A long output is searched in a thread, so that other requests go on.
        """
        if not stop:
            return self
        if self.num_tokens > LONG_TOKENS:
            return await asyncio.to_thread(self._stopped, stop, min_tokens)
        return self._stopped(stop, min_tokens)

    def _stopped(self, stop: Sequence[str], min_tokens: int) -> Answer:
        found = _first_stop(self._pieces, self.num_tokens, stop, min_tokens)
        reasons = (self.finish_reason, None) if found.stop is None else ("stop", found.stop)
        kept = len(found.pieces)
        return Answer(found.pieces, kept, *reasons, logprob=self.logprob, others=self.others)

    def _read(self, start: int, end: int) -> list[Piece]:
        num_missing = end - len(self._drawn)
        if num_missing > 0:
            self._drawn += islice(self._pieces, num_missing)
        return self._drawn[start:end]

    def _logprobs_of(self, token: int, num_top: int) -> TokenLogprob:
        likely = [token, *(other for other in self.others if other != token)]
        return TokenLogprob(token, self.logprob, tuple((each, self.logprob) for each in likely[:num_top]))


class Answers:
    """Writes the outputs of a run. dataset: JSON lines with a key `text` or `output`, for kind "dataset".

    tool_call_share: share of the outputs that call a tool if they may and need not. Raises ValueError for a
    file that cannot be read.
    """

    def __init__(
        self,
        kind: Text,
        tokenizer: Tokenizer,
        seed: int,
        dataset: Path | None = None,
        tool_call_share: float = 0.5,
    ) -> None:
        self._kind = kind
        self._tool_call_share = tool_call_share
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
    ) -> Answer:
        """Returns an output of num_tokens tokens.

        ends: whether it ends by itself there; otherwise a limit ends it. seed: of the request.
        """
        reason = "stop" if ends else "length"
        if self._kind == "random":
            return self._random(request_id, num_tokens, seed, reason)
        source = prompt if self._texts is None else self._tokenizer.encode(next(self._texts))
        if not source:
            return self._random(request_id, num_tokens, seed, reason)
        return Answer(_pieces(self._tokenizer, source, num_tokens), num_tokens, reason)

    async def structured(
        self, request_id: int, structure: Structure, sampling: Sampling, num_tokens: int
    ) -> Answer | None:
        """Returns an output of a form, of about num_tokens tokens; None: it may be free text, and is.

        It ends by itself if its limit allows; tokens that it must have beyond its text are empty. Raises
        ApiError for a form of which none can be drawn. A long output is drawn in a thread, so that other
        requests go on.
        """
        draws = self._draws(request_id, sampling.seed)
        if structure.kind == "tools" and not structure.must_call and draws.random() >= self._tool_call_share:
            return None
        words = list(self._words.values())

        def pieces() -> list[Piece]:
            text = structured_text(
                structure,
                draws,
                num_tokens,
                sampling.max_tokens,
                words,
                lambda text: len(self._encoded(text)),
            )
            tokens = self._encoded(text)
            return list(_pieces(self._tokenizer, tokens, len(tokens)))

        try:
            drawn = pieces() if num_tokens <= LONG_TOKENS else await asyncio.to_thread(pieces)
        except ValueError as error:
            raise ApiError(f"{structure.param}: {error}", param=structure.param) from None
        if structure.kind == "tools" and not structure.must_call and len(drawn) > sampling.max_tokens:
            return None
        wanted = sampling.max_tokens if sampling.ignore_eos else max(len(drawn), sampling.min_tokens)
        length, ends = min(wanted, sampling.max_tokens), wanted <= sampling.max_tokens
        reason = "stop" if ends and not sampling.ignore_eos else "length"
        return Answer(chain(drawn, repeat((0, ""))), length, reason)

    def _encoded(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _draws(self, request_id: int, seed: int | None) -> Random:
        return Random(f"{self._seed} {request_id}" if seed is None else f"seed {seed}")

    def prompt_logprobs(self, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
        """Returns those of a prompt's tokens from the second one on: all tokens are as likely."""
        size = self._tokenizer.vocab_size
        logprob = -log(size)
        found = []
        for token in token_ids[1:]:
            likely = [token, *(other for other in range(min(num_top, size)) if other != token)]
            found.append(TokenLogprob(token, logprob, tuple((each, logprob) for each in likely[:num_top])))
        return found

    def _random(self, request_id: int, num_tokens: int, seed: int | None, reason: str) -> Answer:
        draws = self._draws(request_id, seed)
        words = list(self._words.items())
        likely = list(islice(self._words, 32))
        pieces = _drawn(draws, words)
        return Answer(pieces, num_tokens, reason, logprob=-log(len(words)), others=likely)


def _drawn(draws: Random, words: Sequence[Piece]) -> Iterator[Piece]:
    """Yields words at random, without end."""
    while True:
        yield from draws.choices(words, k=DRAWN_TOGETHER)


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


def _pieces(tokenizer: Tokenizer, source: Sequence[int], num_tokens: int) -> Iterator[Piece]:
    """Yields num_tokens tokens, which repeat the source, and the text that each adds.

    The last token of a character adds it.
    """
    pending: list[int] = []
    for place, token in enumerate(islice(cycle(source), num_tokens), 1):
        pending.append(token)
        text = tokenizer.decode(pending)
        if text.endswith("\ufffd") and len(pending) < 4 and place < num_tokens:
            yield token, ""
            continue
        yield token, text
        pending.clear()


KEYS = ("text", "output")
MAX_BYTES = 256 << 20


def read_texts(file: Path | None) -> list[str]:
    """Returns the texts of a file of JSON lines. Raises ValueError, with the line, if it cannot be read."""
    if file is None:
        raise ValueError("serve.dataset=null: serve.text=dataset needs a file of JSON lines with texts")
    try:
        lines = read_text(file, MAX_BYTES).splitlines()
    except UnreadableFileError as error:
        raise ValueError(f"serve.dataset={file}: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"serve.dataset={file}: cannot be read: {error}") from None
    texts = [_text_of(file, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not texts:
        raise ValueError(f"serve.dataset={file}: has no line with a text")
    return texts


def _text_of(file: Path, number: int, line: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if isinstance(row, dict):
        for key in KEYS:
            if isinstance(row.get(key), str) and row[key]:
                return str(row[key])
    raise ValueError(f"serve.dataset={file}:{number}: expected an object with a text in {' or '.join(KEYS)}")


class _Found(NamedTuple):
    """Tokens up to the end of a stop string, whose texts end before it; stop: None if there is none."""

    pieces: list[Piece]
    stop: str | None


def _first_stop(pieces: Iterator[Piece], num_tokens: int, stop: Sequence[str], min_tokens: int) -> _Found:
    """Returns the tokens up to the first stop string that ends after min_tokens, or all num_tokens."""
    read: list[Piece] = []
    recent, num_chars, longest = "", 0, max(map(len, stop))  # the text in which a new stop string may lie
    for piece in islice(pieces, num_tokens):
        read.append(piece)
        recent = recent[-longest + 1 :] + piece[1] if longest > 1 else piece[1]
        num_chars += len(piece[1])
        found = [(recent.find(each), each) for each in stop if each in recent]
        if found and len(read) > min_tokens:
            at, stopped_by = min(found)
            return _Found(_cut(read, num_chars - len(recent) + at), stopped_by)
    return _Found(read, None)


def _cut(pieces: Sequence[Piece], num_chars: int) -> list[Piece]:
    """Returns the tokens with their texts, which are cut after num_chars characters in all."""
    kept = []
    for token, text in pieces:
        kept.append((token, text[:num_chars]))
        num_chars -= len(kept[-1][1])
    return kept


class OutputLengths:
    """Draws the length of each output.

    kind "workload": the output lengths of the workload, in the order of its requests, with new ones after the
    last; "max_tokens": the limit of the request. Raises ValueError for a workload without requests.
    """

    def __init__(self, kind: OutputLength, workload: Workload, seed: int, max_model_len: int) -> None:
        self._drawn: Iterator[int] | None = None
        if kind == "workload":
            drawn = _lengths(workload, seed, max_model_len)
            self._drawn = chain([next(drawn)], drawn)  # the first raises for a workload without requests

    def draw(self, max_tokens: int, min_tokens: int, *, ignore_eos: bool) -> tuple[int, bool]:
        """Returns the output tokens of the next request, and whether the output ends there by itself."""
        if ignore_eos or self._drawn is None:
            return max_tokens, False
        num_tokens = max(next(self._drawn), min_tokens, 1)
        return min(num_tokens, max_tokens), num_tokens <= max_tokens


def _lengths(workload: Workload, seed: int, max_model_len: int) -> Iterator[int]:
    for run in count(seed):
        is_empty = True
        for arrival in workload.source(seed=run, max_model_len=max_model_len).arrivals():
            is_empty = False
            yield arrival.num_output_tokens
        if is_empty:
            raise ValueError("workload: has no requests from which to take output lengths")
