"""/v1/messages, Anthropic's API: its requests are chat completions, its answers blocks of text and calls."""

from __future__ import annotations

import json
from typing import Annotated, Any

from aiohttp import web
from pydantic import Field

from experiments.serve.backend import Backend
from experiments.serve.errors import ApiError, in_words_of
from experiments.serve.http.block_stream import BlockStream
from experiments.serve.http.chat import chat_of
from experiments.serve.http.common import Form
from experiments.serve.http.event_stream import event
from experiments.serve.http.fields import ChatFields, Name, PassesFieldsOn, Whole, fields_of, parse
from experiments.serve.http.prompts import chat_prompt_of, served_model

RENAMED = {"stop": "stop_sequences", "user": "metadata.user_id"}
"""Fields of a chat completion, and what they are called here."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "abort": "refusal"}
ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class MessagesFields(PassesFieldsOn):
    """The body of /v1/messages; other fields are those of a chat completion."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_tokens: Annotated[Whole, Field(ge=1)]
    system: str | list[dict[str, Any]] = ""
    stop_sequences: list[Name] = Field(default_factory=list)
    stream: bool = False
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: dict[str, Any] | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    thinking: dict[str, Any] = Field(default_factory=dict)
    """It has no effect, as a simulated model does not reason, and a real one does as its template says."""

    def chat(self) -> dict[str, Any]:
        """Returns the body of the chat completion. Raises ApiError."""
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": _parts(self.system)})
        for message in self.messages:
            _add_message(messages, message)
        body = dict(self.model_extra or {}) | {"messages": messages, "stream": self.stream}
        body |= {"max_tokens": self.max_tokens, "stop": self.stop_sequences}
        if "user_id" in self.metadata:
            body["user"] = self.metadata["user_id"]
        if self.tools:
            body["tools"] = [_tool(tool) for tool in self.tools]
        if self.tool_choice is not None:
            kind = str(self.tool_choice.get("type"))
            if kind not in (*CHOICES, "tool"):
                raise ApiError(
                    f"tool_choice.type={kind[:40]}: must be auto, any, tool or none", param="tool_choice"
                )
            named = {"type": "function", "function": {"name": self.tool_choice.get("name")}}
            body["tool_choice"] = CHOICES.get(kind, named)
        if self.stream:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        return body


class CountFields(MessagesFields):
    """The body of /v1/messages/count_tokens."""

    max_tokens: Annotated[Whole, Field(ge=1)] = 1


async def answer(request: web.Request, backend: Backend) -> web.StreamResponse:
    """Answers one request, also with errors in Anthropic's form."""
    try:
        fields = await fields_of(request, MessagesFields)
        with in_words_of(RENAMED):
            chat = parse(ChatFields, fields.chat())
            chat.received_s = fields.received_s
            if chat.n != 1:
                raise ApiError(f"n={chat.n}: an answer has one message; leave it out", param="n")
            request_id, form = request.headers.get("X-Request-Id"), Form(_body, MessagesStream)
            completion = await chat_of(chat, backend, request_id, prefix="msg", form=form)
            return await completion.respond(request, backend)
    except ApiError as error:
        return web.json_response(_error(error), status=error.status, headers=error.headers)


async def count_tokens(request: web.Request, backend: Backend) -> web.StreamResponse:
    """Returns the tokens of the prompt of a request."""
    fields = await fields_of(request, CountFields)
    chat = parse(ChatFields, fields.chat())
    prompt = await chat_prompt_of(chat, served_model(backend, chat.model), backend.tokenizer)
    return web.json_response({"input_tokens": len(prompt)})


def _parts(content: Any) -> Any:
    """Returns blocks of text and images as the parts of a message of a chat. Raises ApiError."""
    if not isinstance(content, list):
        return content
    return [part for block in content if (part := _part(block)) is not None]


def _part(block: Any) -> dict[str, Any] | None:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text":
        return {"type": "text", "text": block.get("text")}
    if kind == "image" and isinstance(source := block.get("source"), dict):
        url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "image_url", "image_url": {"url": url}}
    if kind in ("thinking", "redacted_thinking"):
        return None
    raise ApiError(f"messages: a block of type {str(kind)[:40]} is not supported here", param="messages")


def _add_message(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Appends a message to those of a chat; the results of tools are messages of their own there."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, list):
        messages.append({"role": role, "content": content})
        return
    calls: list[dict[str, Any]] = []
    others: list[Any] = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input", {}))}
            calls.append({"id": block.get("id"), "function": function})
        elif kind == "tool_result":
            result = _parts(block.get("content"))
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
        else:
            others.append(block)
    if calls:
        messages.append({"role": role, "content": _parts(others), "tool_calls": calls})
    elif others:
        messages.append({"role": role, "content": _parts(others)})


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise ApiError(
            f"tools: a tool of type {str(tool['type'])[:40]} is not supported; custom ones are", param="tools"
        )
    own = {"name": tool.get("name"), "description": tool.get("description")}
    return {"type": "function", "function": own | {"parameters": tool.get("input_schema")}}


def _stop_reason(finish_reason: str | None, stop_reason: Any, *, calls: bool) -> str:
    if finish_reason == "stop" and isinstance(stop_reason, str):
        return "stop_sequence"
    if finish_reason == "stop" and calls:
        return "tool_use"
    return STOP_REASONS.get(finish_reason or "", "end_turn")


def _usage(usage: dict[str, Any] | None) -> dict[str, Any]:
    usage = usage or {}
    return {"input_tokens": usage.get("prompt_tokens", 0), "output_tokens": usage.get("completion_tokens", 0)}


def _head(head: dict[str, Any]) -> dict[str, Any]:
    """Returns a message without its content."""
    own = {"id": head["id"], "type": "message", "role": "assistant", "model": head["model"]}
    return own | {"content": [], "stop_reason": None, "stop_sequence": None}


def _body(chat: dict[str, Any]) -> dict[str, Any]:
    """Returns the message that a chat completion is."""
    choice = chat["choices"][0]
    message = choice["message"]
    calls = message.get("tool_calls", [])
    blocks: list[dict[str, Any]] = []
    if message["content"] or not calls:
        blocks.append({"type": "text", "text": message["content"] or ""})
    for call in calls:
        function = call["function"]
        block = {"type": "tool_use", "id": call["id"], "name": function["name"]}
        blocks.append(block | {"input": _input(function["arguments"])})
    reason = _stop_reason(choice["finish_reason"], choice["stop_reason"], calls=bool(calls))
    stopped_by = choice["stop_reason"] if reason == "stop_sequence" else None
    end = {"content": blocks, "stop_reason": reason, "stop_sequence": stopped_by}
    return _head(chat) | end | {"usage": _usage(chat["usage"])}


def _input(arguments: str) -> Any:
    """Returns the arguments of a call; those of one that its limit has cut are an empty object."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {}


def _error(error: ApiError) -> dict[str, Any]:
    kind = ERRORS.get(int(error.status), "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


class MessagesStream(BlockStream):
    """The events of a message."""

    _has_calls = False

    def begin(self) -> bytes:
        usage = _usage(self.usage) | {"output_tokens": 0}
        return event("message_start", {"message": _head(self._fields) | {"usage": usage}})

    def open_block(self) -> bytes:
        block: dict[str, Any] = {"type": "text", "text": ""}
        if self.call is not None:
            self._has_calls = True
            name = self.call["function"]["name"]
            block = {"type": "tool_use", "id": self.call["id"], "name": name, "input": {}}
        return event("content_block_start", {"index": self.num_blocks - 1, "content_block": block})

    def add_text(self, text: str) -> bytes:
        delta = {"type": "text_delta", "text": text}
        if self.call is not None:
            delta = {"type": "input_json_delta", "partial_json": text}
        return event("content_block_delta", {"index": self.num_blocks - 1, "delta": delta})

    def close_block(self) -> bytes:
        return event("content_block_stop", {"index": self.num_blocks - 1})

    def finish(self) -> bytes:
        reason = _stop_reason(self.finish_reason, self.stop_reason, calls=self._has_calls)
        delta = {
            "stop_reason": reason,
            "stop_sequence": self.stop_reason if reason == "stop_sequence" else None,
        }
        return event("message_delta", {"delta": delta, "usage": _usage(self.usage)}) + event(
            "message_stop", {}
        )

    def error(self, error: ApiError) -> bytes:
        return event("error", {"error": _error(error)["error"]})
