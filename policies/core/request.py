"""A request as a client sends it: a prompt, the identity of its content, and the limits the client sets."""

from __future__ import annotations

from typing import NamedTuple


class Segment(NamedTuple):
    """A run of tokens whose content has an id: equal ids at equal positions hold equal tokens.

    Two runs with the same id and position but different lengths share the tokens of the shorter one.
    """

    content_id: int
    num_tokens: int


class Prompt(NamedTuple):
    """A prompt of `num_tokens` tokens; `segments` identify its content, for prefix reuse.

    The segments follow each other from the first token on. They may cover only a part of the prompt: the
    tokens behind the last segment match no other tokens. Content ids are not negative.
    """

    num_tokens: int
    segments: tuple[Segment, ...] = ()
    num_pinned: int = 0
    """Number of first tokens, such as a system prompt, whose KV the client pays to have kept for a while."""


class Branching(NamedTuple):
    """Several answers to one prompt, which share the KV of their common tokens.

    width: number of branches. every: output tokens after which the branches are chosen again among the old
    ones: 1 is beam search, more is tree search; None: never, they are independent samples (parallel sampling,
    n = width).
    """

    width: int
    every: int | None = None


class Request(NamedTuple):
    """One request as a serving engine sees it: everything except the length of its answer.

    arrival_s is on the caller's clock. max_tokens is the client's limit on output tokens; None means that
    only the model's context ends it. A smaller `priority` goes first, as in vLLM. deadline_s: when the client
    wants the whole answer, on the same clock (a batch API's completion window).
    answer_id identifies the content of the answer, so that a later prompt that quotes it finds its KV; None:
    no other request has this content. branching: several answers are asked for; None: one.
    adapter: the name of the LoRA adapter that answers it; None: the base model. model: the name of the model
    that is asked; None: the only model there is.
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
