"""The course of a completion: checks, generations, and the response as a whole or as a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from time import time
from typing import Any
from uuid import uuid4

from aiohttp import web

from experiments.serve.backend import Backend, Delta, Generation, ServedModel
from experiments.serve.errors import ApiError
from experiments.serve.http.event_stream import EventStream
from experiments.serve.http.fields import CommonFields
from experiments.serve.http.outputs import Usage, copies, deltas_of, whole_outputs

MAX_ID_CHARS = 200


@dataclass(frozen=True, slots=True)
class Identity:
    """The id of a request, without and with the prefix of its kind of response, and its time in seconds."""

    request_id: str
    response_id: str
    created: int

    @classmethod
    def of(cls, request: web.Request, fields: CommonFields, prefix: str) -> Identity:
        """Returns the id that the client gives, in the header x-request-id or in the body, or a new one."""
        given = request.headers.get("X-Request-Id") or fields.request_id or uuid4().hex
        given = "".join(char for char in given if char.isprintable())[:MAX_ID_CHARS]
        return cls(given, f"{prefix}-{given}", int(time()))


def generations_of(
    fields: CommonFields,
    prompts: Sequence[Sequence[int]],
    model: ServedModel,
    identity: Identity,
    default_tokens: int | None,
) -> list[Generation]:
    """Returns the generations of a request, those of the first prompt first. Raises ApiError."""
    found: list[Generation] = []
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
        )
        found += copies(generation, fields.n)
    return found


async def respond(
    backend: Backend,
    fields: CommonFields,
    generations: Sequence[Generation],
    *,
    head: dict[str, Any],
    whole_choice: Callable[[int, Any], dict[str, Any]],
) -> web.StreamResponse:
    """Returns the whole response. whole_choice(index, output): one of its choices."""
    usage = _usage_of(generations, fields.n)
    outputs = await whole_outputs(backend, generations, usage)
    choices = [whole_choice(index, output) for index, output in enumerate(outputs)]
    body = head | {"choices": choices, "usage": usage.body(fields.n)}
    return web.json_response(body, headers={"X-Request-Id": head["id"]})


async def stream(
    request: web.Request,
    backend: Backend,
    fields: CommonFields,
    generations: Sequence[Generation],
    *,
    head: dict[str, Any],
    first_choice: Callable[[int], dict[str, Any] | None],
    choice: Callable[[int, Delta], dict[str, Any]],
) -> web.StreamResponse:
    """Streams the response. first_choice(index): a choice sent before the first delta of an output, if any.

    choice(index, delta): the choice of a delta.
    """
    events = EventStream(request, head, {"X-Request-Id": head["id"]})
    usage, options = _usage_of(generations, fields.n), fields.stream_options
    continuous = options is not None and options.continuous_usage_stats
    begun: set[int] = set()
    try:
        async with aclosing(deltas_of(backend, generations)) as deltas:
            async for index, delta in deltas:
                choices = []
                if index not in begun:
                    begun.add(index)
                    if (first := first_choice(index)) is not None:
                        choices.append(first)
                usage.add(index, delta)
                choices.append(choice(index, delta))
                each: list[dict[str, Any]] = [{"choices": [one]} for one in choices]
                if continuous:
                    each = [event | {"usage": usage.body(fields.n)} for event in each]
                await events.send(*each)
    except ApiError as error:
        if not events.has_begun:
            raise
        await events.fail(error)
        return await events.end()
    if options is not None and options.include_usage:
        await events.send({"choices": [], "usage": usage.body(fields.n)})
    return await events.end()


def _usage_of(generations: Sequence[Generation], n: int) -> Usage:
    return Usage(sum(len(each.prompt_token_ids) for each in generations[::n]))
