"""The outputs of one request: `n` for each prompt, generated side by side as requests of their own.

This is what vLLM does with n > 1: the outputs share the KV of the prompt through the prefix cache only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from experiments.serve.backend import Backend, Delta, Generation, TokenLogprob

News = tuple[int, Delta | Exception | None]
"""The index of an output, and a delta of it, the error that has ended it, or None at its end."""


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
        """Appends a delta."""
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
