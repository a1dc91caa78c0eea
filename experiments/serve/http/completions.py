"""/v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from experiments.serve.backend import Backend, Delta, Tokenizer, TokenLogprob
from experiments.serve.http.common import (
    LONG_TOKENS,
    Completion,
    Identity,
    WholeOutput,
    generations_of,
    prompt_logprobs_body,
)
from experiments.serve.http.fields import DEFAULT_COMPLETION_TOKENS, CompletionFields, fields_of
from experiments.serve.http.prompts import prompts_of, served_model


async def complete(request: web.Request, backend: Backend) -> web.StreamResponse:
    """Answers one request. Raises ApiError."""
    fields = await fields_of(request, CompletionFields)
    completion = await completion_of(fields, backend, request.headers.get("X-Request-Id"))
    return await completion.respond(request, backend)


async def completion_of(fields: CompletionFields, backend: Backend, request_id: str | None) -> Completion:
    """Returns the course of a request. request_id: as the client's header has it. Raises ApiError."""
    model, tokenizer = served_model(backend, fields.model), backend.tokenizer
    prompts = await prompts_of(fields.prompt, tokenizer, model.max_model_len)
    identity = Identity.of(request_id, fields, "cmpl")
    generations = generations_of(fields, prompts, model, identity, DEFAULT_COMPLETION_TOKENS)
    head = {
        "id": identity.response_id,
        "object": "text_completion",
        "created": identity.created,
        "model": model.name,
    }
    echoes = [tokenizer.decode(prompt) for prompt in prompts] if fields.echo else []
    lengths = [0] * len(prompts) * fields.n  # characters sent of each output, for text offsets

    def choice_of(index: int, text: str, part: Delta | WholeOutput) -> dict[str, Any]:
        body: dict[str, Any] = {"index": index, "text": text, "logprobs": None}
        if fields.logprobs is not None:
            body["logprobs"] = logprobs_body(tokenizer, part.logprobs, lengths[index])
        lengths[index] += len(text)
        body |= {"finish_reason": part.finish_reason, "stop_reason": part.stop_reason}
        if fields.return_token_ids:
            body["token_ids"] = list(part.token_ids)
        return body

    async def whole_choice(index: int, output: WholeOutput) -> dict[str, Any]:
        body = await text_choice(index, output)
        if fields.prompt_logprobs is not None:
            body["prompt_logprobs"] = await prompt_logprobs_body(tokenizer, output)
        return body

    async def text_choice(index: int, output: WholeOutput) -> dict[str, Any]:
        if not echoes:
            return choice_of(index, output.text, output)
        echo = echoes[index // fields.n]
        lengths[index] = len(echo)
        body = choice_of(index, output.text, output)
        body["text"] = echo + body["text"]
        prompt = await _prompt_of(tokenizer, prompts[index // fields.n][0], output)
        if prompt is not None and fields.logprobs is not None:
            body["logprobs"] = {name: prompt[name] + values for name, values in body["logprobs"].items()}
        return body

    async def first_choice(index: int, delta: Delta) -> dict[str, Any] | None:
        if not echoes:
            return None
        echo = echoes[index // fields.n]
        lengths[index] = len(echo)
        prompt = await _prompt_of(tokenizer, prompts[index // fields.n][0], delta)
        return {"index": index, "text": echo, "logprobs": prompt, "finish_reason": None}

    def choice(index: int, delta: Delta) -> dict[str, Any]:
        return choice_of(index, delta.text, delta)

    return Completion(
        fields=fields,
        generations=generations,
        head=head,
        whole_choice=whole_choice,
        first_choice=first_choice,
        choice=choice,
    )


async def _prompt_of(
    tokenizer: Tokenizer, first: int, part: Delta | WholeOutput
) -> dict[str, list[Any]] | None:
    """Returns the log-probabilities of a prompt, if there are any. first: its first token.

    Those of a long prompt are written in a thread, so that other requests go on.
    """
    known = part.prompt_logprobs
    if known is None:
        return None
    if len(known) > LONG_TOKENS:
        return await asyncio.to_thread(_prompt_body, tokenizer, first, known)
    return _prompt_body(tokenizer, first, known)


def _prompt_body(tokenizer: Tokenizer, first: int, known: Sequence[TokenLogprob]) -> dict[str, list[Any]]:
    """Returns the log-probabilities of a prompt; its first token has none."""
    text = tokenizer.decode([first])
    body = logprobs_body(tokenizer, known, len(text))
    return {
        "text_offset": [0, *body["text_offset"]],
        "tokens": [text, *body["tokens"]],
        "token_logprobs": [None, *body["token_logprobs"]],
        "top_logprobs": [None, *body["top_logprobs"]],
    }


def logprobs_body(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob], offset: int
) -> dict[str, list[Any]]:
    """Returns the log-probabilities of tokens whose text begins after `offset` characters of the output.

    The token itself is among the likely ones, as in OpenAI's API: with logprobs=2 there may be three.
    """

    def own(each: TokenLogprob) -> tuple[int, float]:
        return each.token_id, each.logprob

    texts = [tokenizer.decode([each.token_id]) for each in logprobs]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "text_offset": offsets,
        "tokens": texts,
        "token_logprobs": [each.logprob for each in logprobs],
        "top_logprobs": [
            {tokenizer.decode([token]): value for token, value in (own(each), *each.top)} for each in logprobs
        ],
    }
