"""The bodies of completions and chat completions: fields, their limits, and the sampling that they ask for.

Fields, defaults and limits are those of vLLM's API. A field that is null is as one that is absent. A field of
that API which would change the answer and is not served is refused. Unknown fields are ignored, as clients
and routers send fields of their own.

The module is long because it is one list: every field of the API, with its limits and its refusal.
"""

from __future__ import annotations

import json
import logging
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from experiments.serve.backend import Function, Sampling, Structure
from experiments.serve.errors import ApiError
from experiments.serve.http.kv_transfer import KvTransferParams

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_BIASES = 1024
MAX_BIAS = 100.0
"""Larger biases count as this one, as in vLLM."""
MAX_TOOLS = 1000
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
JSON = "application/json"

_LOG = logging.getLogger("windtunnel.serve")
_NAMED = re.compile(r"([\w.]+)[:=]")
"""The field with which a message about several fields begins."""
_known_to_be_ignored: set[str] = set()

Fields = TypeVar("Fields", bound=BaseModel)
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Int64 = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Whole = Annotated[Int64, Field(ge=0)]
Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]


UNSUPPORTED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((1,), "is not supported; ask for n outputs"),
    "suffix": (("",), "is not supported"),
    "allowed_token_ids": ((), "is not supported; ask for a structured output"),
    "bad_words": (([],), "is not supported"),
    "logits_processors": (([],), "is not supported"),
    "prompt_embeds": (([],), "is not supported; send text or token ids"),
    "truncate_prompt_tokens": ((), "is not supported; send a shorter prompt"),
    "include_stop_str_in_output": ((False,), "is not supported; an output ends before its stop string"),
    "skip_special_tokens": ((True,), "special tokens are never shown"),
    "return_tokens_as_token_ids": ((False,), "is not supported; return_token_ids gives the tokens"),
    "add_special_tokens": ((), "is not supported; send token ids"),
    "add_generation_prompt": ((True,), "an answer always begins with a turn of the assistant"),
    "continue_final_message": ((False,), "is not supported"),
    "chat_template": ((), "templates of requests are not accepted, as in vLLM by default"),
    "documents": (([],), "is not supported"),
    "mm_processor_kwargs": (({},), "is not supported"),
    "modalities": ((["text"],), "an answer is text"),
    "audio": ((), "an answer is text"),
    "functions": (([],), "is not supported; send tools"),
    "function_call": (("none",), "is not supported; send tool_choice"),
    "web_search_options": ((), "is not supported"),
    "thinking_token_budget": ((), "is not supported"),
    "prompt_adapter": ((), "is not supported"),
    "grammar": ((), "is not supported; send guided_grammar or structured_outputs"),
    "guided_decoding_backend": (("auto",), "the server chooses how outputs get their form"),
    "guided_whitespace_pattern": ((), "is not supported"),
}
"""Fields of vLLM's and OpenAI's API that would change the answer: values without effect, and the reason."""
WITHOUT_EFFECT = {
    *("store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "verbosity"),
    *("prompt_cache_retention", "reasoning_effort", "include_reasoning", "parallel_tool_calls"),
    *("spaces_between_special_tokens", "vllm_xargs"),
}
"""Fields that are accepted and change neither the form of an answer nor its time."""


class Body(BaseModel):
    """A JSON body, or a part of one; fields that are null are as absent ones."""

    model_config = ConfigDict(allow_inf_nan=False, extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data

    def refuse_unsupported(self) -> None:
        """Raises ValueError for a field that would change the answer and is not served."""
        for name, value in (self.model_extra or {}).items():
            harmless, reason = UNSUPPORTED.get(name, ((value,), ""))
            if not any(value == each and type(value) is type(each) for each in harmless):
                raise ValueError(f"{name}: {reason}; leave the field out")


class StreamOptions(Body):
    """Usage in a stream: at its end, or in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


Schema = dict[str, Any] | bool


class JsonSchema(Body):
    """A named JSON schema, as OpenAI's response_format has it."""

    name: str = ""
    schema_: Annotated[Schema, Field(alias="schema")] = True


class ResponseFormat(Body):
    """The form of an output, in OpenAI's words."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """The form of an output, in vLLM's words: one of these."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: bool = False
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    grammar: str | None = None
    structural_tag: Any = None


class RequestBody(Body):
    """The body of a request for outputs. received_s: time.monotonic() when the request was read."""

    _received_s: float = PrivateAttr(default_factory=lambda: time.monotonic())

    @property
    def received_s(self) -> float:
        return self._received_s

    @received_s.setter
    def received_s(self, monotonic_s: float) -> None:
        self._received_s = monotonic_s


class PassesFieldsOn(RequestBody):
    """The body of another API, whose further fields are those of a completion."""


class CommonFields(RequestBody):
    """Fields of both kinds of completions."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Whole | None = None
    min_tokens: Whole = 0
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[Int64, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=1 / MAX_PENALTY, le=MAX_PENALTY)] = 1.0
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
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1)] | None = None
    guided_grammar: str | None = None
    logit_bias: Annotated[dict[TokenId, float], Field(max_length=MAX_BIASES)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only allowed with stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs: not available with stream=true, as in vLLM")
        if self.limit == 0 and not self.may_be_prompt_only:
            raise ValueError("max_tokens=0: must be >= 1; only a completion with echo=true may have 0")
        self.refuse_unsupported()
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
        return self.prompt_logprobs

    @property
    def may_be_prompt_only(self) -> bool:
        """True if the limit of the output may be 0."""
        return False

    @property
    def structure(self) -> Structure | None:
        """The form of the outputs; None: free text. Raises ApiError for one that is not supported."""
        return structure_of(self)

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
        max_tokens = room if asked is None else min(asked or 1, room)  # of 0 tokens, the drawn one is hidden
        if self.min_tokens > max_tokens:
            raise ApiError(
                f"min_tokens={self.min_tokens}: must be at most max_tokens={max_tokens}", param="min_tokens"
            )
        biases = (self.logit_bias or {}).items()
        return Sampling(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            temperature=max(self.temperature, MIN_TEMPERATURE) if self.temperature else 0.0,
            top_p=max(self.top_p, MIN_TOP_P),
            top_k=min(max(0, self.top_k), 1 << 30),  # more than any vocabulary
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
            stop=self.stops,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
            logit_bias={token: min(MAX_BIAS, max(-MAX_BIAS, bias)) for token, bias in biases} or None,
        )


class CompletionFields(CommonFields):
    """The body of /v1/completions."""

    prompt: str | list[Any]
    """A text, token ids, or several of either; `prompts.prompts_of` checks what a list holds."""
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def may_be_prompt_only(self) -> bool:
        return self.echo

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs


class ImageUrl(Body):
    """Where an image is; it is never fetched."""

    url: str


class Part(BaseModel):
    """A part of a message: a text, or an image."""

    type: str
    text: str | None = None
    image_url: ImageUrl | str | None = None

    @property
    def image(self) -> str | None:
        """The address of the image, which stands for its content; None: it is a text. Raises ApiError."""
        if self.type in ("text", "input_text", "output_text", "refusal"):
            return None
        if self.type not in ("image_url", "input_image") or self.image_url is None:
            raise ApiError(
                f"messages: a part of type {self.type[:40]} is not supported; text and image_url are",
                param="messages",
            )
        return self.image_url if isinstance(self.image_url, str) else self.image_url.url


class CalledFunction(Body):
    """A function that the assistant has called. arguments: JSON."""

    name: Name
    arguments: str = "{}"


class ToolCall(Body):
    """A call of a tool by the assistant."""

    id: str = ""
    function: CalledFunction


class Message(BaseModel):
    """A message of a conversation. There may be many, so fields are optional in place of a `Body`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    def plain(self, mark_image: Callable[[str], str]) -> dict[str, Any]:
        """Returns the message as chat templates take it, its content as one text. Raises ApiError.

        mark_image: returns the text that holds the place of an image.
        """
        plain: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        parts = self.content if isinstance(self.content, list) else []
        plain["content"] = self.content if isinstance(self.content, str) else ""
        for part in parts:
            plain["content"] += (part.text or "") if part.image is None else mark_image(part.image)
        if self.tool_calls:
            plain["tool_calls"] = [
                {"id": call.id, "type": "function", "function": call.function.model_dump(include=_CALL)}
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            plain["tool_call_id"] = self.tool_call_id
        return plain


_CALL = {"name", "arguments"}


class FunctionFields(Body):
    """A function that the assistant may call. parameters: the JSON schema of its arguments."""

    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    """A tool that the assistant may call."""

    type: Literal["function"] = "function"
    function: FunctionFields


class NamedFunction(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """A choice of one tool."""

    type: Literal["function"] = "function"
    function: NamedFunction


class ChatFields(CommonFields):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Whole | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool = False
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def calls_by_name(self) -> bool:
        """True if the request names the function that is to be called."""
        return isinstance(self.tool_choice, NamedTool)

    @property
    def structure(self) -> Structure | None:
        asked = structure_of(self)
        if not self.tools or self.tool_choice == "none":
            if self.tool_choice not in (None, "none", "auto"):
                raise ApiError("tool_choice: needs tools to choose from", param="tool_choice")
            return asked
        functions = [Function(each.function.name, each.function.parameters or {}) for each in self.tools]
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            functions = [each for each in functions if each.name == name]
            if not functions:
                raise ApiError(f"tool_choice: {name[:80]} is none of the tools", param="tool_choice")
        must_call = self.tool_choice not in (None, "auto")
        if asked is not None:
            raise ApiError(
                f"{asked.param}: cannot be combined with tools, which may be called; set tool_choice=none",
                param=asked.param,
            )
        return Structure("tools", tuple(functions), "tool_choice", must_call)

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


class TokenizeFields(Body):
    """The body of /tokenize: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] = []
    chat_template_kwargs: dict[str, Any] = {}
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give either prompt or messages")
        return self


class DetokenizeFields(Body):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


def parse(kind: type[Fields], body: bytes | Mapping[str, Any]) -> Fields:
    """Returns the fields of a body, JSON or its values. Raises ApiError with the first mistake."""
    try:
        fields = kind.model_validate_json(body) if isinstance(body, bytes) else kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"][:3])
        message = str(first["msg"]).removeprefix("Value error, ")
        found = f", found {_shown(first['input'])}" if where else ""
        named = _NAMED.match(message)
        param = where or (named[1] if named else None)
        raise ApiError(f"{where}: {message}{found}" if where else message, param=param) from None
    if not isinstance(fields, PassesFieldsOn):
        _log_ignored(fields)
    return fields


def _log_ignored(fields: BaseModel) -> None:
    """Logs the name of each unknown field once; clients send hundreds of thousands of them."""
    for name in fields.model_extra or ():
        if name in UNSUPPORTED or name in WITHOUT_EFFECT:
            continue
        if name not in _known_to_be_ignored and len(_known_to_be_ignored) < 100:
            _known_to_be_ignored.add(name)
            _LOG.warning("The field %r of requests is not known and is ignored.", name[:80])


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def structure_of(fields: CommonFields) -> Structure | None:
    """Returns the form that a request asks for, by any of its fields. Raises ApiError."""
    found: list[Structure] = []
    asked = fields.response_format
    if asked is not None and asked.type == "json_object":
        found.append(Structure("json", {"type": "object"}, "response_format"))
    elif asked is not None and asked.type == "json_schema":
        if asked.json_schema is None:
            raise ApiError("response_format.json_schema: is missing", param="response_format")
        found.append(Structure("json", asked.json_schema.schema_, "response_format"))
    own = fields.structured_outputs or StructuredOutputs()
    if own.structural_tag is not None:
        raise ApiError("structured_outputs.structural_tag: is not supported", param="structured_outputs")
    if own.json_object:
        found.append(Structure("json", {"type": "object"}, "structured_outputs"))
    values: tuple[tuple[Literal["json", "choice", "regex", "grammar"], Any, str], ...] = (
        ("json", own.json_, "structured_outputs"),
        ("json", fields.guided_json, "guided_json"),
        ("regex", own.regex, "structured_outputs"),
        ("regex", fields.guided_regex, "guided_regex"),
        ("choice", own.choice, "structured_outputs"),
        ("choice", fields.guided_choice, "guided_choice"),
        ("grammar", own.grammar, "structured_outputs"),
        ("grammar", fields.guided_grammar, "guided_grammar"),
    )
    for kind, value, param in values:
        if value is not None:
            found.append(Structure(kind, _parsed(value, param) if kind == "json" else value, param))
    if len(found) > 1:
        names = ", ".join(dict.fromkeys(each.param for each in found))
        raise ApiError(f"{names}: an output can have one form only", param=found[1].param)
    if found and fields.use_beam_search:
        raise ApiError(f"{found[0].param}: not with use_beam_search=true", param=found[0].param)
    return found[0] if found else None


def _parsed(schema: Any, param: str) -> Any:
    """Returns a JSON schema that may be given as text. Raises ApiError."""
    if not isinstance(schema, str):
        return schema
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict | bool):
        raise ApiError(f"{param}: must be a JSON schema, an object", param=param)
    return parsed


async def fields_of(request: web.Request, kind: type[Fields]) -> Fields:
    """Returns the fields of a JSON body. Raises ApiError.

    As in vLLM, the body must be declared as JSON. Pages of other sites cannot do this, so a browser lets none
    of them use a server on its machine.
    """
    if "Content-Type" not in request.headers or request.content_type != JSON:
        raise ApiError(f"Unsupported Media Type: Only '{JSON}' is allowed")
    body = await request.read()
    received_s = time.monotonic()  # before the body is parsed, which takes time
    fields = parse(kind, body)
    if isinstance(fields, RequestBody):
        fields.received_s = received_s
    return fields
