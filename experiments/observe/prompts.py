"""Contents for prompts: equal segments get equal tokens, so that prefix caches find what ours do.

A prompt consists of runs (`policies.caching.content.prompt_runs`); the k-th token of a run depends on the
seed and the run's content alone. What a later turn of a conversation quotes is the server's own answer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from numpy.random import Generator

from policies.caching.content import prompt_runs
from policies.core.request import Request
from sim.workload.streams import stream

_COMMON = (
    "time year people way day man thing life child world school state family student group country "
    "problem hand part place case week company system program question work government number night "
    "point home water room mother area money story fact month lot right study book eye job word "
    "business issue side kind head house service friend father power hour game line end member law car "
    "city name team minute idea body back parent face others level office door health person art war "
    "history party result change morning reason research"
)
WORDS = tuple(_COMMON.split())
"""Most vocabularies know these as one token each, with the blank before them."""


class Prompts(Protocol):
    """Writes prompts."""

    def write(self, request: Request) -> str:
        """The prompt as JSON: a list of token ids, or a text."""
        ...

    def remember(self, answer_id: int, token_ids: list[int], text: str) -> None:
        """What the server answered, for prompts that quote it."""
        ...


@dataclass(kw_only=True, slots=True)
class TokenPrompts:
    """Random token ids from `low` up to, not including, `end`."""

    seed: int
    low: int
    end: int
    _said: dict[int, list[int]] = field(default_factory=dict)

    def write(self, request: Request) -> str:
        ids: list[int] = []
        for content_id, num_tokens in prompt_runs(request):
            ids += self._content(content_id, num_tokens)
        return f"[{','.join(map(str, ids))}]"

    def remember(self, answer_id: int, token_ids: list[int], text: str) -> None:
        if token_ids:
            self._said[answer_id] = token_ids

    def _content(self, content_id: int, num_tokens: int) -> list[int]:
        said = self._said.get(content_id, [])[:num_tokens]
        if len(said) == num_tokens:
            return said
        drawn: list[int] = _stream(self.seed, content_id).integers(self.low, self.end, num_tokens).tolist()
        return said + drawn[len(said) :]


class TextLength(NamedTuple):
    """What a text costs on the server: tokens = overhead + words * tokens_per_word."""

    tokens_per_word: float = 1.0
    overhead_tokens: float = 0.0


@dataclass(kw_only=True, slots=True)
class TextPrompts:
    """Common words, as many as make about the right number of tokens; at least one."""

    seed: int
    length: TextLength
    _said: dict[int, str] = field(default_factory=dict)

    def write(self, request: Request) -> str:
        place = self.length.overhead_tokens  # in tokens, from the start of what the server will see
        end = 0.0
        parts = []
        for content_id, num_tokens in prompt_runs(request):
            end += num_tokens
            said = self._said.get(content_id)
            if said is not None:
                parts.append(said)
                place += num_tokens
                continue
            num_words = round((end - place) / self.length.tokens_per_word)
            if num_words > 0:
                parts.append(" ".join(self._words(content_id, num_words)))
                place += num_words * self.length.tokens_per_word
        return json.dumps(" ".join(parts) or WORDS[0])

    def remember(self, answer_id: int, token_ids: list[int], text: str) -> None:
        if text:
            self._said[answer_id] = text

    def _words(self, content_id: int, num_words: int) -> list[str]:
        drawn = _stream(self.seed, content_id).integers(0, len(WORDS), num_words)
        return [WORDS[i] for i in drawn.tolist()]


def text_length(few: tuple[int, int], many: tuple[int, int]) -> TextLength:
    """From two texts, each (words, tokens that the server counted).

    16 words are 43 tokens and 64 words 115: 1.5 tokens a word, and 19 around them.
    """
    per_word = max((many[1] - few[1]) / (many[0] - few[0]), 0.1)
    return TextLength(per_word, max(few[1] - few[0] * per_word, 0.0))


def _stream(seed: int, content_id: int) -> Generator:
    """Contents that nobody else has are numbered below 0."""
    if content_id < 0:
        return stream(seed, "own_content", -content_id)
    return stream(seed, "content", content_id)
