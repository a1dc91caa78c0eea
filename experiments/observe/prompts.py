"""Generates the contents of prompts; equal segments get equal tokens, so prefix caches find the same hits.

A prompt consists of segments (`policies.caching.content.prompt_segments`); the k-th token of a segment
depends only on the seed and the content id. Outputs that later turns of a conversation contain are the
server's own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from numpy.random import Generator

from policies.caching.content import prompt_segments
from policies.core.request import Request
from sim.workload.distributions import stream

_COMMON = (
    "time year people way day man thing life child world school state family student group country "
    "problem hand part place case week company system program question work government number night "
    "point home water room mother area money story fact month lot right study book eye job word "
    "business issue side kind head house service friend father power hour game line end member law car "
    "city name team minute idea body back parent face others level office door health person art war "
    "history party result change morning reason research"
)
WORDS = tuple(_COMMON.split())
"""Words that are one token each in most vocabularies, with the blank before them."""


class Prompts(Protocol):
    """Generates prompts."""

    def write(self, request: Request) -> str:
        """Returns the prompt as JSON: a list of token ids, or a text."""
        ...

    def remember(self, answer_id: int, token_ids: list[int], text: str) -> None:
        """Stores an output of the server, for prompts that contain it."""
        ...


@dataclass(kw_only=True, slots=True)
class TokenPrompts:
    """Prompts of random token ids from `low` up to, not including, `end`."""

    seed: int
    low: int
    end: int
    _outputs: dict[int, list[int]] = field(default_factory=dict)

    def write(self, request: Request) -> str:
        ids: list[int] = []
        for content_id, num_tokens in prompt_segments(request):
            ids += self._content(content_id, num_tokens)
        return f"[{','.join(map(str, ids))}]"

    def remember(self, answer_id: int, token_ids: list[int], text: str) -> None:
        if token_ids:
            self._outputs[answer_id] = token_ids

    def _content(self, content_id: int, num_tokens: int) -> list[int]:
        output = self._outputs.get(content_id, [])[:num_tokens]
        if len(output) == num_tokens:
            return output
        drawn: list[int] = _stream(self.seed, content_id).integers(self.low, self.end, num_tokens).tolist()
        return output + drawn[len(output) :]


class TextLength(NamedTuple):
    """Length of a text on the server: tokens = overhead_tokens + words * tokens_per_word."""

    tokens_per_word: float = 1.0
    overhead_tokens: float = 0.0


@dataclass(kw_only=True, slots=True)
class TextPrompts:
    """Prompts of as many common words as make about the right number of tokens; at least one word."""

    seed: int
    length: TextLength
    _outputs: dict[int, str] = field(default_factory=dict)

    def write(self, request: Request) -> str:
        place = self.length.overhead_tokens  # tokens of the prompt so far, as the server counts them
        end = 0.0
        parts = []
        for content_id, num_tokens in prompt_segments(request):
            end += num_tokens
            output = self._outputs.get(content_id)
            if output is not None:
                parts.append(output)
                place += num_tokens
                continue
            num_words = round((end - place) / self.length.tokens_per_word)
            if num_words > 0:
                parts.append(" ".join(self._words(content_id, num_words)))
                place += num_words * self.length.tokens_per_word
        return json.dumps(" ".join(parts) or WORDS[0])

    def remember(self, answer_id: int, token_ids: list[int], text: str) -> None:
        if text:
            self._outputs[answer_id] = text

    def _words(self, content_id: int, num_words: int) -> list[str]:
        drawn = _stream(self.seed, content_id).integers(0, len(WORDS), num_words)
        return [WORDS[i] for i in drawn.tolist()]


def text_length(few: tuple[int, int], many: tuple[int, int]) -> TextLength:
    """Computes the length from two texts, each (words, tokens counted by the server).

    16 words with 43 tokens and 64 words with 115: 1.5 tokens per word and an overhead of 19.
    """
    per_word = max((many[1] - few[1]) / (many[0] - few[0]), 0.1)
    return TextLength(per_word, max(few[1] - few[0] * per_word, 0.0))


def _stream(seed: int, content_id: int) -> Generator:
    """Returns the random stream of a content; ids below 0 are contents of a single request."""
    if content_id < 0:
        return stream(seed, "own_content", -content_id)
    return stream(seed, "content", content_id)
