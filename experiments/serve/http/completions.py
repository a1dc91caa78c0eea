"""/v1/completions."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from experiments.serve.backend import Backend, Delta, Tokenizer, TokenLogprob
from experiments.serve.errors import ApiError
from experiments.serve.http.body import fields_of
from experiments.serve.http.common import Completion, Identity, generations_of
from experiments.serve.http.fields import DEFAULT_COMPLETION_TOKENS, CompletionFields
from experiments.serve.http.outputs import WholeOutput
from experiments.serve.http.prompts import prompts_of, served_model


async def complete(request: web.Request, backend: Backend) -> web.StreamResponse:
    """Answers one request. Raises ApiError."""
    fields = await fields_of(request, CompletionFields)
    completion = await completion_of(fields, backend, request.headers.get("X-Request-Id"))
    return await completion.respond(request, backend)


async def completion_of(fields: CompletionFields, backend: Backend, request_id: str | None) -> Completion:
    """Returns the course of a request. request_id: as the client's header has it. Raises ApiError."""
    if fields.echo and fields.logprobs is not None:
        raise ApiError("echo=true, logprobs: log-probabilities of the prompt are not supported", param="echo")
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
    lengths = [0] * len(generations)  # characters sent of each output, for text offsets

    def choice_of(index: int, text: str, part: Delta | WholeOutput) -> dict[str, Any]:
        body: dict[str, Any] = {"index": index, "text": text, "logprobs": None}
        if fields.logprobs is not None:
            body["logprobs"] = logprobs_body(tokenizer, part.logprobs, lengths[index])
        lengths[index] += len(text)
        body |= {"finish_reason": part.finish_reason, "stop_reason": part.stop_reason}
        if fields.return_token_ids:
            body["token_ids"] = list(part.token_ids)
        return body

    def whole_choice(index: int, output: WholeOutput) -> dict[str, Any]:
        echo = echoes[index // fields.n] if echoes else ""
        return choice_of(index, echo + output.text, output)

    def first_choice(index: int) -> dict[str, Any] | None:
        if not echoes:
            return None
        return {"index": index, "text": echoes[index // fields.n], "logprobs": None, "finish_reason": None}

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


def logprobs_body(
    tokenizer: Tokenizer, logprobs: tuple[TokenLogprob, ...] | list[TokenLogprob], offset: int
) -> dict[str, Any]:
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
