"""Runs an observation from its settings. It imports the client library, so import it late."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from experiments.observe.endpoint import connect
from experiments.observe.load import BEAT_S, Load, PreparedRequest
from experiments.observe.probe import Probed, probe
from experiments.observe.reply import Reply
from experiments.observe.settings import ObserveSettings
from sim.engine.clock import Interrupt
from sim.settings.errors import ConfigError
from sim.workload.base import Arrival, Source


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """A finished run."""

    load: Load
    probed: Probed
    source: Source


async def observe(
    settings: ObserveSettings,
    *,
    interrupt: Interrupt | None = None,
    begin: Callable[[Source], Callable[[float, int, int], None] | None] = lambda source: None,
) -> Observed:
    """Probes the server, then runs the load. Raises ConfigError before the first request of the load.

    Raises KeyboardInterrupt if Ctrl-C comes while the server is probed.

    begin: called with the source of requests; returns the progress callback of `Load.run`.
    """
    async with connect(settings) as endpoint:
        probed = await _unless_interrupted(probe(endpoint, settings), interrupt)
        try:
            source = settings.workload.source(seed=settings.seed, max_model_len=probed.max_model_len)
        except (ValueError, OSError) as error:
            raise ConfigError(str(error)) from error

        def write(arrival: Arrival) -> PreparedRequest:
            request = arrival.request
            exact = arrival.num_output_tokens if settings.exact_output else None
            limit = exact or request.max_tokens
            if limit is None and settings.api == "completions":  # its default is only 16 tokens
                limit = probed.max_model_len - request.prompt.num_tokens
            prompt = probed.prompts.write(request)
            body = probed.dialect.body(prompt, limit, wants_ids=request.answer_id is not None)
            return PreparedRequest(request, exact, body)

        def answered(reply: Reply) -> None:
            if reply.request.answer_id is not None:
                probed.prompts.remember(reply.request.answer_id, reply.token_ids, reply.text)

        load = Load(
            source,
            write=write,
            send=endpoint.send,
            answered=answered,
            until_s=settings.until_s,
            give_up_after=settings.give_up_after,
            interrupt=interrupt,
        )
        await load.run(begin(source))
        return Observed(load=load, probed=probed, source=source)


async def _unless_interrupted(work: Coroutine[Any, Any, Probed], interrupt: Interrupt | None) -> Probed:
    """Waits for the result, however long a server is silent. Raises KeyboardInterrupt after Ctrl-C."""
    task = asyncio.create_task(work)
    while not (await asyncio.wait([task], timeout=BEAT_S))[0]:
        if interrupt is not None and interrupt.noted:
            task.cancel()
            await asyncio.wait([task])
            raise KeyboardInterrupt
    return task.result()
