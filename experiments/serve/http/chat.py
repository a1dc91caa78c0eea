"""/v1/chat/completions."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from experiments.serve.backend import Backend, Delta, Tokenizer, TokenLogprob
from experiments.serve.http.common import (
    CHUNKS,
    Completion,
    Form,
    Identity,
    WholeOutput,
    generations_of,
    prompt_logprobs_body,
)
from experiments.serve.http.fields import ChatFields, fields_of
from experiments.serve.http.prompts import chat_prompt_of, served_model
from experiments.serve.http.tool_calls import ToolCallParser


async def chat(request: web.Request, backend: Backend) -> web.StreamResponse:
    """Answers one request. Raises ApiError."""
    fields = await fields_of(request, ChatFields)
    completion = await chat_of(fields, backend, request.headers.get("X-Request-Id"))
    return await completion.respond(request, backend)


async def chat_of(
    fields: ChatFields,
    backend: Backend,
    request_id: str | None,
    *,
    prefix: str = "chatcmpl",
    form: Form = CHUNKS,
) -> Completion:
    """Returns the course of a request. Raises ApiError.

    request_id: as the client's header has it. prefix, form: of the response, if it is of another API.
    """
    model, tokenizer = served_model(backend, fields.model), backend.tokenizer
    prompt = await chat_prompt_of(fields, model, tokenizer)
    identity = Identity.of(request_id, fields, prefix)
    generations = generations_of(fields, [prompt], model, identity, None)
    head: dict[str, Any] = {
        "id": identity.response_id,
        "object": "chat.completion.chunk" if fields.stream else "chat.completion",
        "created": identity.created,
        "model": model.name,
    }
    last = fields.messages[-1]
    echo = last.content if fields.echo and last.role == "assistant" and isinstance(last.content, str) else ""
    structure = generations[0].structure
    may_call = structure is not None and structure.kind == "tools"
    parsers = [ToolCallParser() for _ in range(fields.n)] if may_call else []

    def ending(index: int, part: Delta | WholeOutput) -> dict[str, Any]:
        body: dict[str, Any] = {"logprobs": None}
        if fields.logprobs:
            body["logprobs"] = {"content": [logprob_body(tokenizer, each) for each in part.logprobs]}
        reason = part.finish_reason
        if reason == "stop" and may_call and parsers[index].num_calls and not fields.calls_by_name:
            reason = "tool_calls"  # a function that the request names ends with "stop", as in OpenAI's API
        body |= {"finish_reason": reason, "stop_reason": part.stop_reason}
        if fields.return_token_ids:
            body["token_ids"] = list(part.token_ids)
        return body

    async def whole_choice(index: int, output: WholeOutput) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": echo + output.text}
        if may_call:
            message |= parsers[index].message(output.text)
        if fields.prompt_logprobs is not None:  # of the prompt, which all choices share
            head["prompt_logprobs"] = await prompt_logprobs_body(tokenizer, output)
        return {"index": index, "message": message, **ending(index, output)}

    async def first_choice(index: int, _: Delta) -> dict[str, Any]:
        delta = {"role": "assistant", "content": echo}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def choice(index: int, delta: Delta) -> dict[str, Any] | None:
        parts: dict[str, Any] = {"content": delta.text}
        if may_call:
            parts = parsers[index].add(delta.text, ends=delta.finish_reason is not None)
            if not parts and delta.finish_reason is None:
                return None
        return {"index": index, "delta": parts, **ending(index, delta)}

    return Completion(
        fields=fields,
        generations=generations,
        head=head,
        whole_choice=whole_choice,
        first_choice=first_choice,
        choice=choice,
        form=form,
    )


def logprob_body(tokenizer: Tokenizer, logprob: TokenLogprob) -> dict[str, Any]:
    """Returns the log-probability of a token and of the most likely ones."""
    return {
        **_token_body(tokenizer, logprob.token_id, logprob.logprob),
        "top_logprobs": [_token_body(tokenizer, token, value) for token, value in logprob.top],
    }


def _token_body(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    text = tokenizer.decode([token_id])
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}
