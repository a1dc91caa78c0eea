"""The interface between the HTTP server and what answers: a simulated fleet, or the real engine."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Sampling parameters of one output, with the names and meanings of vLLM's API.

    max_tokens: limit of the output tokens. min_tokens: no end of sequence and no stop string ends the output
    before. logprobs: number of most likely tokens to report with each token; None: no log-probabilities.
    prompt_logprobs: the same for the tokens of the prompt. logit_bias: numbers that are added to logits.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None


class RemoteKv(NamedTuple):
    """Shares KV between a request and one on another replica, as in vLLM's `kv_transfer_params`.

    keeps: it only computes its prompt, and its KV is kept for the other one (do_remote_decode). engine_id,
    request_id: the request with whose KV it continues (do_remote_prefill). num_cached_tokens: tokens of the
    prompt that the other replica has found in its cache.
    """

    keeps: bool = False
    engine_id: str = ""
    request_id: str = ""
    num_cached_tokens: int | None = None


class Function(NamedTuple):
    """A tool that an output may call. schema: the JSON schema of its arguments."""

    name: str
    schema: Mapping[str, Any] | bool


class Structure(NamedTuple):
    """The form that an output must have. param: the field of the request that asks for it.

    kind: json, with a JSON schema as value; choice, with the texts of which it is one; regex, with a pattern
    that matches all of it; grammar, with one in Lark or GBNF; tools, with the functions that it may call, one
    of them if `must_call`.
    """

    kind: Literal["json", "choice", "regex", "grammar", "tools"]
    value: Any
    param: str
    must_call: bool = False


class BeamSearch(NamedTuple):
    """A search for the likeliest outputs of a prompt. width: hypotheses that are kept in each step.

    length_penalty: exponent of the length by which a log-probability is divided.
    """

    width: int
    length_penalty: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One output to generate for one prompt, or all outputs of a beam search.

    request_id: the client's or the server's id of the request. model: name of the base model. lora: name of
    the LoRA adapter; None: the base model alone. cache_salt: prompts with different salts share no KV.
    streamed: whether the client gets every delta at once. window_s: wall seconds from now in which it needs
    the whole output (the completion window of a batch); None: it set no deadline. output_index, num_outputs:
    its place among the outputs of the prompt, and their number (n of the API). replica: index of the replica
    that has to serve it; None: any. remote_kv: KV that it shares with another replica. received_s:
    time.monotonic() when the request was received. deliver: takes a delta without a switch of tasks; see
    `Deliver`. None: all deltas are yielded. beam_search: it has num_outputs outputs, the best of this search;
    of its sampling only max_tokens and ignore_eos count. None: it is one output. structure: the form of the
    output; None: free text. is_prompt_only: its client wants no output, and the one drawn token is hidden.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    model: str
    lora: str | None = None
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    streamed: bool = False
    window_s: float | None = None
    output_index: int = 0
    num_outputs: int = 1
    replica: int | None = None
    remote_kv: RemoteKv | None = None
    received_s: float = field(default_factory=lambda: time.monotonic())
    deliver: Deliver | None = None
    beam_search: BeamSearch | None = None
    structure: Structure | None = None
    is_prompt_only: bool = False

    @property
    def num_own_outputs(self) -> int:
        """Number of outputs that it generates itself."""
        return 1 if self.beam_search is None else self.num_outputs


class TokenLogprob(NamedTuple):
    """Log-probability of a token. top: those of the most likely tokens, the likeliest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Delta(NamedTuple):
    """Tokens of an output since its last delta, and its end.

    finish_reason: "stop", "length" or "abort" in the last delta, else None. stop_reason: the stop string or
    token id that has ended the output. num_cached_tokens: prompt tokens whose KV was reused.
    kv_transfer_params: where the KV is kept, for the request that continues with it. prompt_logprobs: in the
    first delta those of the prompt's tokens from the second one on, if they are wanted. place: of its output
    among those of the generation.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    kv_transfer_params: Mapping[str, Any] | None = None
    prompt_logprobs: Sequence[TokenLogprob] | None = None
    place: int = 0


Deliver = Callable[[Delta], bool]
"""Takes a delta between the first and the last at once; returns false if the delta is to be yielded instead.

A back end may call it while `generate` waits for tokens. A layer that changes deltas takes it away.
"""


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids: all are smaller."""
        ...

    @property
    def max_token_bytes(self) -> int | None:
        """Most bytes of text that one token may stand for; None: not known."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids."""
        ...

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the text of a conversation, up to the start of the assistant's next turn.

        tools: that the assistant may call. settings: further variables of a chat template, which may ignore
        them. Raises ValueError for what the template rejects.
        """
        ...


class ServedModel(NamedTuple):
    """A model or LoRA adapter that requests may name. base: name of the base model of an adapter.

    tokens_per_image: of an image in a message; None: it takes no images. embedding_size: dimensions of its
    embeddings; None: it has none.
    """

    name: str
    max_model_len: int
    base: str | None = None
    tokens_per_image: int | None = None
    embedding_size: int | None = None


class Backend(Protocol):
    """Generates outputs. All methods are called in the event loop of the server."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the base model."""
        ...

    def models(self) -> Sequence[ServedModel]:
        """Returns the base models and the loaded adapters; the first is the default."""
        ...

    def generate(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        """Yields the deltas of one output; closing the generator aborts it.

        Raises `errors.ApiError` for a request that is not served.
        """
        ...

    def unhealthy_because(self) -> str | None:
        """Returns why no request would be served now; None: the back end is healthy."""
        ...

    @property
    def num_in_progress(self) -> int:
        """Number of outputs that have not ended."""
        ...


class BackendLayer:
    """A back end in front of another one, which does what a subclass does not do itself."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def tokenizer(self) -> Tokenizer:
        return self._backend.tokenizer

    @property
    def num_in_progress(self) -> int:
        return self._backend.num_in_progress

    def models(self) -> Sequence[ServedModel]:
        return self._backend.models()

    def unhealthy_because(self) -> str | None:
        return self._backend.unhealthy_because()

    def generate(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        return self._backend.generate(generation)
