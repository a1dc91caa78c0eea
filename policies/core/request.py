"""A request as a client sends it: a prompt, the identity of its content, and the client's limits."""

from __future__ import annotations

from typing import NamedTuple


class Segment(NamedTuple):
    """Consecutive tokens with a content id: equal ids at equal positions have equal tokens.

    Two segments with the same id and position but different lengths share the tokens of the shorter one.
    """

    content_id: int
    num_tokens: int


class Prompt(NamedTuple):
    """A prompt of `num_tokens` tokens; `segments` identify its content, for prefix reuse.

    The segments follow each other from the first token on. They may cover only a part of the prompt: the
    tokens after the last segment match no other tokens. Content ids are not negative.
    """

    num_tokens: int
    segments: tuple[Segment, ...] = ()
    num_pinned: int = 0
    """Number of leading tokens, such as a system prompt, whose KV the client pays to keep in the cache."""


class Branching(NamedTuple):
    """Several outputs for one prompt, which share the KV of their common tokens.

    width: number of branches. every: output tokens after which new branches are chosen from the old ones: 1
    is beam search, more is tree search; None: the branches are independent samples (parallel sampling, n =
    width).
    """

    width: int
    every: int | None = None


class Request(NamedTuple):
    """One request as a serving engine sees it; its true output length is not part of it.

    arrival_s: seconds on the caller's clock. max_tokens: the client's limit on output tokens; None: only the
    model's context limits them. priority: smaller is served first, as in vLLM. deadline_s: time at which the
    client needs the complete output, on the same clock (the completion window of a batch API). answer_id:
    identifies the content of the output, so that a later prompt that contains it has a cache hit; None: no
    other request has this content. branching: several outputs; None: one.
    adapter: name of the LoRA adapter; None: the base model. model: name of the model; None: the only model.
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
