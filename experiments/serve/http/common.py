"""The course of a completion: checks, generations, and the response as a whole or as a stream.

The outputs of one request, `n` for each prompt, are generated side by side as requests of their own. This is
what vLLM does with n > 1: the outputs share the KV of the prompt through the prefix cache only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
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

LONG_TOKENS = 1000
MAX_ID_CHARS = 200
MAX_OUTPUTS = 4096
"""Outputs of one request."""
News = tuple[int, Delta | Exception | None]
"""The index of an output, and a delta of it, the error that has ended it, or None at its end."""


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


@dataclass(slots=True)
class Usage:
    """Tokens of a request so far."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: dict[int, int] = field(default_factory=dict)  # by index of the output

    def add(self, index: int, delta: Delta) -> None:
        """Counts a delta of the output `index`."""
        self.completion_tokens += len(delta.token_ids)
        if delta.num_cached_tokens:
            self.cached_tokens[index] = delta.num_cached_tokens

    def body(self, num_outputs_per_prompt: int) -> dict[str, Any]:
        """Returns the usage object; cached tokens of a prompt count once, with its first output."""
        cached = sum(
            tokens for index, tokens in self.cached_tokens.items() if index % num_outputs_per_prompt == 0
        )
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }


@dataclass(slots=True)
class WholeOutput:
    """An output, as far as it has come."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    kv_transfer_params: Mapping[str, Any] | None = None
    prompt_logprobs: Sequence[TokenLogprob] | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, delta: Delta) -> None:
        """Appends the text, tokens and log-probabilities of a delta, and keeps the reasons of its end."""
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.kv_transfer_params = delta.kv_transfer_params
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs


def copies(generation: Generation, n: int) -> list[Generation]:
    """Returns the generations of n outputs; with a seed, each has its own."""
    seed = generation.sampling.seed
    if n == 1:
        return [generation]
    return [
        replace(
            generation,
            request_id=f"{generation.request_id}-{index}",
            output_index=index,
            num_outputs=n,
            sampling=replace(generation.sampling, seed=None if seed is None else _wrapped(seed + index)),
        )
        for index in range(n)
    ]


def _wrapped(seed: int) -> int:
    """Returns a seed within the 64 bits of a signed integer."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


async def deltas_of(
    backend: Backend, generations: Sequence[Generation]
) -> AsyncGenerator[tuple[int, Delta], None]:
    """Yields (index of the output, delta) until all outputs have ended.

    The error of one output ends all of them.
    """
    if len(generations) == 1:
        async with aclosing(backend.generate(generations[0])) as stream:
            async for delta in stream:
                yield delta.place, shown(delta) if generations[0].is_prompt_only else delta
        return
    news: asyncio.Queue[News] = asyncio.Queue(maxsize=2 * len(generations))
    tasks = [
        asyncio.create_task(_forward(backend, each, i * each.num_own_outputs, news))
        for i, each in enumerate(generations)
    ]
    try:
        num_running = len(tasks)
        while num_running:
            index, item = await news.get()
            if isinstance(item, Delta):
                yield index, shown(item) if generations[0].is_prompt_only else item
            elif item is None:
                num_running -= 1
            else:
                raise item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def shown(delta: Delta) -> Delta:
    """Returns the delta of a request that only wants its prompt, without the token that was drawn."""
    reason = "length" if delta.finish_reason == "stop" else delta.finish_reason
    return delta._replace(text="", token_ids=(), logprobs=(), finish_reason=reason, stop_reason=None)


async def _forward(backend: Backend, generation: Generation, first: int, news: asyncio.Queue[News]) -> None:
    """Puts the deltas of a generation into the queue, and at its end None or its error.

    first: index of its first output.

    A task that is cancelled puts nothing more, as nothing may take it from a full queue.
    """
    try:
        async with aclosing(backend.generate(generation)) as stream:
            async for delta in stream:
                await news.put((first + delta.place, delta))
    except Exception as error:
        await news.put((first, error))
    else:
        await news.put((first, None))


async def whole_outputs(
    backend: Backend, generations: Sequence[Generation], usage: Usage
) -> list[WholeOutput]:
    """Returns the outputs when all have ended, and counts their tokens."""
    outputs = [WholeOutput() for each in generations for _ in range(each.num_own_outputs)]
    async with aclosing(deltas_of(backend, generations)) as stream:
        async for index, delta in stream:
            outputs[index].add(delta)
            usage.add(index, delta)
    return outputs
