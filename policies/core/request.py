"""What a client asks for: a prompt, its content's identity, and the limits it sets."""

from __future__ import annotations

from typing import NamedTuple


class Segment(NamedTuple):
    """A run of tokens whose content has a name: equal ids at equal places hold equal tokens.

    Two runs of one id at one place, one longer than the other, share the tokens of the shorter.
    """

    content_id: int
    num_tokens: int


class Prompt(NamedTuple):
    """`num_tokens` tokens; `segments` name their content from the first token on, for prefix reuse.

    Segments may cover a part of the prompt only: tokens behind the last segment are like no others.
    Content ids are not negative.
    """

    num_tokens: int
    segments: tuple[Segment, ...] = ()
    num_pinned: int = 0
    """First tokens, a system prompt say, whose KV the client pays to have kept for a while."""


class Branching(NamedTuple):
    """Several answers to one prompt, which share the KV of what they have in common.

    width: branches. every: after so many tokens the branches are chosen anew among the old ones: 1 is beam
    search, more is tree search; None: never, they are independent samples (parallel sampling, n = width).
    """

    width: int
    every: int | None = None


class Request(NamedTuple):
    """One request as a serving engine sees it: everything but how long the answer will be.

    arrival_s is on the caller's clock. max_tokens is the client's limit on output tokens; None means that
    only the model's context ends it. A smaller `priority` goes first, as in vLLM. deadline_s: when the client
    wants the whole answer, on the same clock (a batch API's completion window).
    answer_id names the content of the answer, so that a later prompt that quotes it finds its KV; None: a
    content that nobody else has. branching: several answers are asked for; None: one.
    adapter: the LoRA adapter that answers it, by name; None: the model as it is. model: which one is asked,
    by name; None: the only one there is.
    """

    request_id: int
    arrival_s: float
    prompt: Prompt
    max_tokens: int | None = None
    priority: int = 0
    tenant: str = ""
    session_id: int | None = None
    deadline_s: float | None = None
    answer_id: int | None = None
    branching: Branching | None = None
    adapter: str | None = None
    model: str | None = None
