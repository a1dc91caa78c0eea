"""/generate, SGLang's API, and /inference/v1/generate, vLLM's for token ids: completions in other words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Annotated, Any

from aiohttp import web
from pydantic import Field

from experiments.serve.backend import Backend
from experiments.serve.errors import ApiError, in_words_of
from experiments.serve.http.common import Form
from experiments.serve.http.completions import completion_of
from experiments.serve.http.event_stream import DONE, EventStream, encode_json
from experiments.serve.http.fields import CompletionFields, PassesFieldsOn, TokenId, fields_of, parse

DEFAULT_NEW_TOKENS = 128
RENAMED = {
    "prompt": "text",
    "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
    "request_id": "rid",
    "structured_outputs": "sampling_params",
}
"""Fields of a completion, and what SGLang calls them."""
NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
FORMS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}
"""SGLang's names of the forms of outputs, and vLLM's."""
WITHOUT_EFFECT = ("stream_interval", "custom_params", "log_metrics")


class PromptFields(CompletionFields):
    """A completion that may have no output at all."""

    @property
    def may_be_prompt_only(self) -> bool:
        return True


class GenerateFields(PassesFieldsOn):
    """The body of SGLang's /generate."""

    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    stream: bool = False
    rid: str | None = None
    lora_path: str | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1

    def completion(self) -> dict[str, Any]:
        """Returns the body of the completion. Raises ApiError."""
        if (self.text is None) == (self.input_ids is None):
            raise ApiError("text: give either text or input_ids", param="text")
        if self.logprob_start_len not in (-1, 0) or (self.return_logprob and self.logprob_start_len == 0):
            raise ApiError(
                f"logprob_start_len={self.logprob_start_len}: log-probabilities of the prompt are not "
                "supported; leave it out",
                param="logprob_start_len",
            )
        for name, value in (self.model_extra or {}).items():
            if name not in WITHOUT_EFFECT and value not in (False, 0, [], {}):
                raise ApiError(f"{name[:80]}: is not supported; leave it out", param=name[:80])
        params = {NAMES.get(k, k): v for k, v in self.sampling_params.items() if k not in WITHOUT_EFFECT}
        forms = {FORMS[name]: params.pop(name) for name in FORMS if params.get(name) is not None}
        params.setdefault("max_tokens", DEFAULT_NEW_TOKENS)
        return params | {
            "prompt": self.text if self.text is not None else self.input_ids,
            "model": self.lora_path,
            "stream": self.stream,
            "stream_options": {"continuous_usage_stats": True} if self.stream else None,
            "request_id": self.rid,
            "logprobs": 0 if self.return_logprob else None,
            "structured_outputs": forms or None,
            "return_token_ids": True,
        }


class TokensFields(PassesFieldsOn):
    """The body of /inference/v1/generate; other fields are those of a completion."""

    token_ids: Annotated[list[TokenId], Field(min_length=1)]
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    stream: bool = False
    features: None = None

    def completion(self) -> dict[str, Any]:
        """Returns the body of the completion."""
        body = dict(self.model_extra or {}) | self.sampling_params
        return body | {"prompt": self.token_ids, "stream": self.stream, "return_token_ids": True}


async def generate(request: web.Request, backend: Backend) -> web.StreamResponse:
    """Answers one request in SGLang's form. Raises ApiError."""
    fields = await fields_of(request, GenerateFields)
    with in_words_of(RENAMED):
        own = parse(PromptFields, fields.completion())
        own.received_s = fields.received_s
        completion = await completion_of(own, backend, request.headers.get("X-Request-Id"))
        prompts = [len(each.prompt_token_ids) for each in completion.generations]
        is_batch = len(prompts) > 1 or isinstance(fields.text, list)
        form = Form(partial(_outputs, prompts, is_batch), partial(GenerateStream, prompts, is_batch))
        return await replace(completion, form=form).respond(request, backend)


async def generate_tokens(request: web.Request, backend: Backend) -> web.StreamResponse:
    """Answers one request of token ids with token ids. Raises ApiError."""
    fields = await fields_of(request, TokensFields)
    with in_words_of({"prompt": "token_ids"}):
        own = parse(CompletionFields, fields.completion())
        own.received_s = fields.received_s
        completion = await completion_of(own, backend, request.headers.get("X-Request-Id"))
        form = Form(_token_choices, TokensStream)
        return await replace(completion, form=form).respond(request, backend)


def _reason(choice: dict[str, Any], num_tokens: int) -> dict[str, Any] | None:
    """Returns why an output ends, in SGLang's words."""
    kind = choice["finish_reason"]
    if kind == "length":
        return {"type": "length", "length": num_tokens}
    return None if kind is None else {"type": kind, "matched": choice["stop_reason"]}


def _meta(
    head: dict[str, Any],
    choice: dict[str, Any],
    num_prompt: int,
    num_tokens: int,
    usage: dict[str, Any],
    *,
    is_batch: bool,
) -> dict[str, Any]:
    meta = {
        "id": head["id"].removeprefix("cmpl-"),
        "finish_reason": _reason(choice, num_tokens),
        "prompt_tokens": num_prompt,
        "completion_tokens": num_tokens,
    }
    if not is_batch:
        meta["cached_tokens"] = usage["prompt_tokens_details"]["cached_tokens"]
    return meta


def _logprobs(choice: dict[str, Any]) -> list[Any] | None:
    """Returns [log-probability, token, no text] of each token, as SGLang does; None: they are not wanted."""
    if choice["logprobs"] is None:
        return None
    pairs = zip(choice["logprobs"]["token_logprobs"], choice["token_ids"], strict=False)
    return [[value, token, None] for value, token in pairs]


def _outputs(prompts: Sequence[int], is_batch: bool, body: dict[str, Any]) -> dict[str, Any] | list[Any]:
    """Returns the outputs that a completion has. prompts: tokens of the prompt of each."""
    found = []
    for choice, num_prompt in zip(body["choices"], prompts, strict=True):
        num_tokens = len(choice["token_ids"])
        meta = _meta(body, choice, num_prompt, num_tokens, body["usage"], is_batch=is_batch)
        if (logprobs := _logprobs(choice)) is not None:
            meta["output_token_logprobs"] = logprobs
        found.append({"text": choice["text"], "output_ids": choice["token_ids"], "meta_info": meta})
    return found if is_batch else found[0]


class GenerateStream(EventStream):
    """SGLang's events: each has the whole output so far."""

    def __init__(self, prompts: Sequence[int], is_batch: bool, *response: Any) -> None:
        super().__init__(*response)
        self._prompts, self._is_batch = prompts, is_batch
        self._texts: list[list[str]] = [[] for _ in prompts]
        self._token_ids: list[list[int]] = [[] for _ in prompts]
        self._logprobs: list[list[Any]] = [[] for _ in prompts]

    def _events(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None) -> bytes:
        return b"".join([b"data: %b\n\n" % encode_json(self._output(each, usage or {})) for each in choices])

    def _output(self, choice: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
        index = choice["index"]
        self._texts[index].append(choice["text"])
        tokens = self._token_ids[index]
        tokens += choice["token_ids"]
        meta = _meta(self._fields, choice, self._prompts[index], len(tokens), usage, is_batch=self._is_batch)
        if (logprobs := _logprobs(choice)) is not None:
            self._logprobs[index] += logprobs
            meta["output_token_logprobs"] = self._logprobs[index]
        self._texts[index] = ["".join(self._texts[index])]
        output = {"text": self._texts[index][0], "output_ids": tokens, "meta_info": meta}
        return output | ({"index": index} if self._is_batch else {})

    def _last(self, usage: dict[str, Any] | None) -> bytes:
        return DONE


def _token_choice(choice: dict[str, Any]) -> dict[str, Any]:
    kept = ("index", "logprobs", "finish_reason", "token_ids")
    return {key: choice[key] for key in kept}


def _token_choices(body: dict[str, Any]) -> dict[str, Any]:
    return {
        "request_id": body["id"].removeprefix("cmpl-"),
        "choices": [_token_choice(each) for each in body["choices"]],
        "prompt_logprobs": next((each.get("prompt_logprobs") for each in body["choices"]), None),
        "kv_transfer_params": body.get("kv_transfer_params"),
    }


class TokensStream(EventStream):
    """The events of /inference/v1/generate."""

    def _events(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None) -> bytes:
        request_id = self._fields["id"].removeprefix("cmpl-")
        events = [{"request_id": request_id, "choices": [_token_choice(each)]} for each in choices]
        events += [{"request_id": request_id, "choices": [], "usage": usage}] if usage and not choices else []
        return b"".join(chain.from_iterable((b"data: ", encode_json(each), b"\n\n") for each in events))
