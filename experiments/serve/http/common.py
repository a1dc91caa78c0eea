"""The course of a completion: checks, generations, and the response as a whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from time import time
from typing import Any, NamedTuple
from uuid import uuid4

from aiohttp import web

from experiments.serve.backend import (
    Backend,
    BeamSearch,
    Delta,
    Generation,
    ServedModel,
    Tokenizer,
    TokenLogprob,
)
from experiments.serve.errors import ApiError
from experiments.serve.http.event_stream import EventStream
from experiments.serve.http.fields import CommonFields, StreamOptions
from experiments.serve.http.outputs import Usage, WholeOutput, copies, deltas_of, whole_outputs

LONG_TOKENS = 1000
MAX_ID_CHARS = 200
MAX_OUTPUTS = 4096
"""Outputs of one request."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The id of a request, without and with the prefix of its kind of response, and its time in seconds."""

    request_id: str
    response_id: str
    created: int

    @classmethod
    def of(cls, header: str | None, fields: CommonFields, prefix: str) -> Identity:
        """Returns the id that the client gives, in the header x-request-id or in the body, or a new one."""
        given = (header or fields.request_id or "")[:MAX_ID_CHARS]
        given = "".join(char for char in given if char.isprintable()) or uuid4().hex
        return cls(given, f"{prefix}-{given}", int(time()))


def generations_of(
    fields: CommonFields,
    prompts: Sequence[Sequence[int]],
    model: ServedModel,
    identity: Identity,
    default_tokens: int | None,
) -> list[Generation]:
    """Returns the generations of a request, those of the first prompt first. Raises ApiError."""
    if len(prompts) * fields.n > MAX_OUTPUTS:
        raise ApiError(
            f"n={fields.n}: {len(prompts)} prompts would have {len(prompts) * fields.n} outputs, and a "
            f"request has at most {MAX_OUTPUTS}",
            param="n",
        )
    found: list[Generation] = []
    shared, num_outputs = fields.kv_transfer_params, fields.n * len(prompts)
    remote_kv, structure = None, fields.structure
    if shared is not None:
        remote_kv = shared.remote_kv(num_outputs=num_outputs, limit=fields.limit, is_streamed=fields.stream)
    for place, prompt in enumerate(prompts):
        generation = Generation(
            request_id=f"{identity.response_id}-{place}" if len(prompts) > 1 else identity.response_id,
            prompt_token_ids=prompt,
            sampling=fields.sampling(len(prompt), model.max_model_len, default_tokens),
            model=model.base or model.name,
            lora=None if model.base is None else model.name,
            priority=fields.priority,
            tenant=fields.user or "",
            cache_salt=fields.cache_salt or "",
            streamed=fields.stream,
            remote_kv=remote_kv,
            received_s=fields.received_s,
            structure=structure,
            is_prompt_only=fields.limit == 0,
        )
        if fields.use_beam_search:
            search = BeamSearch(fields.n, fields.length_penalty)
            found.append(replace(generation, beam_search=search, num_outputs=fields.n))
        else:
            found += copies(generation, fields.n)
    return found


class Form(NamedTuple):
    """The form of a response. body: its whole, from that of OpenAI's API. stream: makes its stream."""

    body: Callable[[dict[str, Any]], dict[str, Any] | list[Any]] = lambda body: body
    stream: Callable[[web.Request, dict[str, Any], dict[str, str]], EventStream] = EventStream


CHUNKS = Form()
"""The form of OpenAI's completions, whose streams are chunks with choices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """The course of one request: its generations, and how its response is written.

    head: the fields that the response and all chunks of a stream have. whole_choice(index, output): a choice
    of the whole response. first_choice(index, delta): a choice sent before the first delta of an output, if
    any. choice(index, delta): the choice of a delta; None: nothing of it is sent. form: of the response.
    """

    fields: CommonFields
    generations: Sequence[Generation]
    head: dict[str, Any]
    whole_choice: Callable[[int, WholeOutput], Awaitable[dict[str, Any]]]
    first_choice: Callable[[int, Delta], Awaitable[dict[str, Any] | None]]
    choice: Callable[[int, Delta], dict[str, Any] | None]
    form: Form = CHUNKS

    async def respond(self, request: web.Request, backend: Backend) -> web.StreamResponse:
        """Returns the response, as a whole or as a stream. Raises ApiError."""
        if self.fields.stream:
            return await self._stream(request, backend)
        return web.json_response(await self.whole(backend), headers=self._headers)

    async def whole(self, backend: Backend) -> dict[str, Any] | list[Any]:
        """Returns the body of the whole response. Raises ApiError."""
        usage = self._usage()
        outputs = await whole_outputs(backend, self.generations, usage)
        choices = [
            await self.whole_choice(index, output)
            for index, output in enumerate(outputs)
            # A beam search may find fewer outputs.
            if output.finish_reason is not None or not self.fields.use_beam_search
        ]
        body = self.head | {"choices": choices, "usage": usage.body(self.fields.n)}
        if outputs[0].kv_transfer_params is not None:
            body["kv_transfer_params"] = dict(outputs[0].kv_transfer_params)
        return self.form.body(body)

    async def _stream(self, request: web.Request, backend: Backend) -> web.StreamResponse:
        events = self.form.stream(request, self.head, self._headers)
        usage, num_outputs = self._usage(), self.fields.n
        options = self.fields.stream_options or StreamOptions()
        begun: set[int] = set()

        def so_far() -> dict[str, Any] | None:
            return usage.body(num_outputs) if options.continuous_usage_stats else None

        def deliver(delta: Delta) -> bool:
            if not events.takes_at_once:
                return False
            usage.add(0, delta)
            choice = self.choice(0, delta)
            if choice is not None:
                events.send_at_once(choice, so_far())
            return True

        generations = self.generations
        if len(generations) == 1:
            generations = [replace(generations[0], deliver=deliver)]
        try:
            async with aclosing(deltas_of(backend, generations)) as deltas:
                async for index, delta in deltas:
                    first = None if index in begun else await self.first_choice(index, delta)
                    begun.add(index)
                    usage.add(index, delta)
                    choices = [each for each in (first, self.choice(index, delta)) if each is not None]
                    if choices:
                        await events.send(choices, so_far())
        except ApiError as error:
            if not events.has_begun:
                raise
            return await events.fail(error)
        return await events.end(usage.body(num_outputs) if options.include_usage else None)

    @property
    def _headers(self) -> dict[str, str]:
        return {"X-Request-Id": self.head["id"]}

    def _usage(self) -> Usage:
        prompts = self.generations[:: self.fields.n // self.generations[0].num_own_outputs]
        return Usage(sum(len(each.prompt_token_ids) for each in prompts))


async def prompt_logprobs_body(tokenizer: Tokenizer, output: WholeOutput) -> list[Any]:
    """Returns the log-probabilities of a prompt's tokens in vLLM's form; the first token has none.

    Those of a long prompt are written in a thread, so that other requests go on.
    """
    known = output.prompt_logprobs or ()

    def entry(each: TokenLogprob) -> dict[str, Any]:
        ranks = {token: (value, rank) for rank, (token, value) in enumerate(each.top, 1)}
        own = {each.token_id: ranks.get(each.token_id, (each.logprob, None))}
        return {
            str(token): {"logprob": value, "rank": rank, "decoded_token": tokenizer.decode([token])}
            for token, (value, rank) in (own | ranks).items()
        }

    def body() -> list[Any]:
        return [None, *map(entry, known)]

    return body() if len(known) <= LONG_TOKENS else await asyncio.to_thread(body)
