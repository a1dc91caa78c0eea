"""/v1/responses, OpenAI's second API: its requests are chat completions, its answers lists of items.

Responses are not stored: `previous_response_id` and `background` are refused.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from aiohttp import web
from pydantic import Field

from experiments.serve.backend import Backend
from experiments.serve.errors import ApiError, in_words_of
from experiments.serve.http.block_stream import BlockStream
from experiments.serve.http.chat import chat_of
from experiments.serve.http.common import Form
from experiments.serve.http.event_stream import event
from experiments.serve.http.fields import ChatFields, PassesFieldsOn, Whole, fields_of, parse

RENAMED = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
"""Fields of a chat completion, and what they are called here."""


class ResponsesFields(PassesFieldsOn):
    """The body of /v1/responses; other fields are those of a chat completion."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Annotated[Whole, Field(ge=1)] | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    text: dict[str, Any] = Field(default_factory=dict)
    stream: bool = False
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    include: list[Literal["reasoning.encrypted_content"]] = Field(default_factory=list)
    """There is no reasoning to include."""
    reasoning: dict[str, Any] = Field(default_factory=dict)

    def chat(self) -> dict[str, Any]:
        """Returns the body of the chat completion. Raises ApiError."""
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        for item in items:
            _add_item(messages, item)
        body = dict(self.model_extra or {}) | {"messages": messages, "stream": self.stream}
        body["max_tokens"] = self.max_output_tokens
        if self.tools:
            body["tools"] = [_tool(tool) for tool in self.tools]
        choice = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "function":
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        body["tool_choice"] = choice
        wanted = self.text.get("format")
        if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
            wanted = {"type": "json_schema", "json_schema": {k: v for k, v in wanted.items() if k != "type"}}
        body["response_format"] = wanted
        if self.stream:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        return body


async def respond(request: web.Request, backend: Backend) -> web.StreamResponse:
    """Answers one request. Raises ApiError."""
    fields = await fields_of(request, ResponsesFields)
    with in_words_of(RENAMED):
        chat = parse(ChatFields, fields.chat())
        chat.received_s = fields.received_s
        if chat.n != 1:
            raise ApiError(f"n={chat.n}: a response has one output; leave it out", param="n")
        request_id = request.headers.get("X-Request-Id")
        form = Form(partial(_body, fields), partial(ResponsesStream, fields))
        completion = await chat_of(chat, backend, request_id, prefix="resp", form=form)
        return await completion.respond(request, backend)


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """Appends an item of the input to the messages of a chat. Raises ApiError for one that is not known."""
    kind = item.get("type", "message")
    if kind == "message":
        messages.append({"role": item.get("role"), "content": item.get("content")})
    elif kind == "function_call":
        call = {"id": item.get("call_id"), "function": {key: item.get(key) for key in ("name", "arguments")}}
        if messages and messages[-1].get("tool_calls"):
            messages[-1]["tool_calls"].append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
    elif kind != "reasoning":  # which the next turn does not see, as in vLLM's chat templates
        raise ApiError(f"input: an item of type {str(kind)[:40]} is not supported", param="input")


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        kind = str(tool.get("type"))[:40]
        raise ApiError(f"tools: a tool of type {kind} is not supported; functions are", param="tools")
    return {
        "type": "function",
        "function": {k: tool[k] for k in ("name", "description", "parameters") if k in tool},
    }


def _shell(fields: ResponsesFields, head: dict[str, Any], status: str) -> dict[str, Any]:
    """Returns a response without its output."""
    return {
        "id": head["id"],
        "object": "response",
        "created_at": head["created"],
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "model": head["model"],
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "temperature": (fields.model_extra or {}).get("temperature", 1.0),
        "text": fields.text or {"format": {"type": "text"}},
        "tool_choice": fields.tool_choice or "auto",
        "tools": fields.tools,
        "top_p": (fields.model_extra or {}).get("top_p", 1.0),
        "truncation": "disabled",
        "usage": None,
    }


def _status(finish_reason: str | None) -> str:
    return {"length": "incomplete", "abort": "cancelled"}.get(finish_reason or "", "completed")


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }


def _text_item(head: dict[str, Any], number: int, text: str, status: str) -> dict[str, Any]:
    content: list[Any] = [{"type": "output_text", "text": text, "annotations": [], "logprobs": None}]
    item_id = f"msg_{head['id'].removeprefix('resp-')}_{number}"
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def _call_item(call: dict[str, Any], arguments: str, status: str) -> dict[str, Any]:
    return {
        "id": f"fc_{call['id'].rpartition('-')[2]}",
        "type": "function_call",
        "call_id": call["id"],
        "name": call["function"]["name"],
        "arguments": arguments,
        "status": status,
    }


def _body(fields: ResponsesFields, chat: dict[str, Any]) -> dict[str, Any]:
    """Returns the response that a chat completion is."""
    choice = chat["choices"][0]
    message, status = choice["message"], _status(choice["finish_reason"])
    calls = message.get("tool_calls", [])
    items = [_text_item(chat, 0, message["content"] or "", status)] if message["content"] or not calls else []
    items += [_call_item(call, call["function"]["arguments"], status) for call in calls]
    return _shell(fields, chat, status) | {"output": items, "usage": _usage(chat["usage"])}


class ResponsesStream(BlockStream):
    """The events of a response; each has the number of its place."""

    def __init__(
        self, fields: ResponsesFields, request: web.Request, head: dict[str, Any], headers: dict[str, str]
    ) -> None:
        super().__init__(request, head, headers)
        self._of = fields
        self._number = -1
        self._items: list[dict[str, Any]] = []

    def _event(self, kind: str, **values: Any) -> bytes:
        self._number += 1
        return event(f"response.{kind}", values | {"sequence_number": self._number})

    def _at(self) -> dict[str, Any]:
        """Returns where the present block is."""
        place = {"item_id": self._item("in_progress")["id"], "output_index": self.num_blocks - 1}
        return place if self.call else place | {"content_index": 0}

    def _item(self, status: str) -> dict[str, Any]:
        if self.call is not None:
            return _call_item(self.call, self.text, status)
        return _text_item(self._fields, self.num_blocks - 1, self.text, status)

    def begin(self) -> bytes:
        response = _shell(self._of, self._fields, "in_progress")
        return self._event("created", response=response) + self._event("in_progress", response=response)

    def open_block(self) -> bytes:
        item = self._item("in_progress")
        place = {"output_index": self.num_blocks - 1}
        if self.call is not None:
            return self._event("output_item.added", item=item, **place)
        part = item["content"].pop()
        return self._event("output_item.added", item=item, **place) + self._event(
            "content_part.added", part=part, **self._at()
        )

    def add_text(self, text: str) -> bytes:
        if self.call is not None:
            return self._event("function_call_arguments.delta", delta=text, **self._at())
        return self._event("output_text.delta", delta=text, logprobs=[], **self._at())

    def close_block(self) -> bytes:
        item = self._item(_status(self.finish_reason))
        self._items.append(item)
        if self.call is not None:
            name = self.call["function"]["name"]
            content = self._event(
                "function_call_arguments.done", arguments=self.text, name=name, **self._at()
            )
        else:
            content = self._event("output_text.done", text=self.text, logprobs=[], **self._at())
            content += self._event("content_part.done", part=item["content"][0], **self._at())
        return content + self._event("output_item.done", item=item, output_index=self.num_blocks - 1)

    def finish(self) -> bytes:
        status = _status(self.finish_reason)
        response = _shell(self._of, self._fields, status) | {"output": self._items}
        response["usage"] = None if self.usage is None else _usage(self.usage)
        return self._event("incomplete" if status == "incomplete" else "completed", response=response)

    def error(self, error: ApiError) -> bytes:
        failure = {"code": "server_error", "message": error.message}
        response = _shell(self._of, self._fields, "failed") | {"error": failure, "output": self._items}
        return self._event("failed", response=response)
