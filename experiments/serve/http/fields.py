"""The bodies of completions and chat completions: fields, their limits, and the sampling that they ask for.

Fields, defaults and limits are those of vLLM's API. Unknown fields are ignored, as clients and routers send
fields of their own.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from experiments.serve.backend import Sampling
from experiments.serve.errors import ApiError
from experiments.serve.http.kv_transfer import KvTransferParams

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_TEMPERATURE = MAX_PENALTY = 1000.0
"""Beyond these, logits in 32-bit numbers overflow."""
MIN_TEMPERATURE, MIN_TOP_P = 0.01, 1e-6
"""Smaller values that are not 0 are raised to these, the temperature as in vLLM."""
MAX_LENGTH_PENALTY = 20
"""Larger exponents of the length of an output in a beam search would overflow."""
MAX_NAME_CHARS = 1000
"""Characters of a stop string, and of the names that a server keeps: users and cache salts."""
DEFAULT_COMPLETION_TOKENS = 16
"""Limit of the output tokens of a completion that sets none; a chat fills the context."""

_LOG = logging.getLogger("windtunnel.serve")
_known_to_be_ignored: set[str] = set()

Fields = TypeVar("Fields", bound=BaseModel)
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Int64 = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Whole = Annotated[Int64, Field(ge=0)]
Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]


class StreamOptions(BaseModel):
    """Usage in a stream: at its end, or in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class CommonFields(BaseModel):
    """Fields of both kinds of completions."""

    model_config = ConfigDict(allow_inf_nan=False, extra="allow")

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[Int64, Field(ge=1)] | None = None
    min_tokens: Whole = 0
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Int64, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1 / MAX_PENALTY, le=MAX_PENALTY)] | None = None
    seed: Int64 | None = None
    stop: Name | Annotated[list[Name], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    use_beam_search: bool = False
    """Whether the n outputs are the best of a beam search of this width; other sampling is ignored."""
    length_penalty: float = 1.0
    priority: Int64 = 0
    user: Name | None = None
    cache_salt: Annotated[Name, Field(min_length=1)] | None = None
    request_id: str | None = None
    return_token_ids: bool = False
    kv_transfer_params: KvTransferParams | None = None

    _received_s: float = PrivateAttr(default_factory=lambda: time.monotonic())

    @property
    def received_s(self) -> float:
        """Value of time.monotonic() when the request was read."""
        return self._received_s

    @received_s.setter
    def received_s(self, monotonic_s: float) -> None:
        self._received_s = monotonic_s

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only allowed with stream=true")
        if any(not each for each in self.stops):
            raise ValueError("stop: must not contain an empty string")
        if self.use_beam_search:
            self._check_beam_search()
        return self

    def _check_beam_search(self) -> None:
        if self.stream:
            raise ValueError(
                "Streaming is not currently supported with beam search, whose outputs are known at its end; "
                "set stream=false"
            )
        if self.num_logprobs is not None:
            raise ValueError("logprobs: not reported with use_beam_search=true; leave the field out")
        if abs(self.length_penalty) > MAX_LENGTH_PENALTY:
            raise ValueError(
                f"length_penalty={self.length_penalty:g}: must be >= -{MAX_LENGTH_PENALTY} and "
                f"<= {MAX_LENGTH_PENALTY}"
            )

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Returns the number of most likely tokens to report with each token; None: no log-probabilities."""

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Most likely tokens to report with each token of the prompt; None: no log-probabilities."""
        return None

    @property
    def limit(self) -> int | None:
        """The request's own limit of the output tokens."""
        return self.max_tokens

    def sampling(self, num_prompt_tokens: int, max_model_len: int, default_tokens: int | None) -> Sampling:
        """Returns the sampling of each output. Raises ApiError for a request longer than the context."""
        room = max_model_len - num_prompt_tokens
        asked = default_tokens if self.limit is None else self.limit
        if room < 1 or (self.limit is not None and self.limit > room):
            raise ApiError(
                f"This model's maximum context length is {max_model_len} tokens, and the request has "
                f"{num_prompt_tokens} prompt tokens and asks for {asked or 1} output tokens; shorten the "
                "prompt or lower max_tokens",
                param="max_tokens" if room >= 1 else "prompt",
            )
        max_tokens = room if asked is None else min(asked, room)
        if self.min_tokens > max_tokens:
            raise ApiError(
                f"min_tokens={self.min_tokens}: must be at most max_tokens={max_tokens}", param="min_tokens"
            )
        temperature = _or(self.temperature, 1.0)
        return Sampling(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            temperature=max(temperature, MIN_TEMPERATURE) if temperature else 0.0,
            top_p=max(_or(self.top_p, 1.0), MIN_TOP_P),
            top_k=min(max(0, self.top_k or 0), 1 << 30),  # more than any vocabulary
            min_p=_or(self.min_p, 0.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            seed=self.seed,
            stop=self.stops,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
        )


class CompletionFields(CommonFields):
    """The body of /v1/completions."""

    prompt: str | list[Any]
    """A text, token ids, or several of either; `prompts.prompts_of` checks what a list holds."""
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None


class TextPart(BaseModel):
    """A part of a message; only text is served."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str = ""


class Message(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None

    def plain(self) -> dict[str, str]:
        """Returns role and text. Raises ApiError for content that is not text."""
        role = "system" if self.role == "developer" else self.role
        if not isinstance(self.content, list):
            return {"role": role, "content": self.content or ""}
        for part in self.content:
            if part.type != "text":
                raise ApiError(
                    f"messages: a part of type {part.type[:40]} is not supported; only text is",
                    param="messages",
                )
        return {"role": role, "content": "".join(part.text for part in self.content)}


class ChatFields(CommonFields):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[Int64, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool = False

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only allowed with logprobs=true")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TokenizeFields(BaseModel):
    """The body of /tokenize: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give either prompt or messages")
        return self


class DetokenizeFields(BaseModel):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


def parse(kind: type[Fields], body: bytes) -> Fields:
    """Returns the fields of a body. Raises ApiError with the first mistake."""
    try:
        fields = kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"][:3])
        message = str(first["msg"]).removeprefix("Value error, ")
        found = f", found {_shown(first['input'])}" if where else ""
        raise ApiError(f"{where}: {message}{found}" if where else message, param=where or None) from None
    _log_ignored(fields)
    return fields


def _log_ignored(fields: BaseModel) -> None:
    """Logs the name of each unknown field once; clients send hundreds of thousands of them."""
    for name in fields.model_extra or ():
        if name not in _known_to_be_ignored and len(_known_to_be_ignored) < 100:
            _known_to_be_ignored.add(name)
            _LOG.warning("The field %r of requests is not known and is ignored.", name[:80])


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
