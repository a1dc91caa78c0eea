"""Several outputs of one request."""

import asyncio
from contextlib import aclosing
from types import SimpleNamespace

import pytest

pytest.importorskip("aiohttp", reason="needs the extra serve: pip install 'windtunnel[serve]'")

from experiments.serve.backend import Delta, Generation, Sampling
from experiments.serve.errors import ApiError
from experiments.serve.http.common import deltas_of

GENERATIONS = [
    Generation(request_id=str(i), prompt_token_ids=[1], sampling=Sampling(max_tokens=9), model="m")
    for i in range(3)
]


def test_outputs_end_when_their_client_leaves_with_deltas_unread():
    closed = []

    async def generate(generation):
        try:
            while True:
                yield Delta("a", (1,))
                await asyncio.sleep(0)
        finally:
            closed.append(generation.request_id)

    async def leave():
        async with aclosing(deltas_of(SimpleNamespace(generate=generate), GENERATIONS)) as deltas:
            async for _ in deltas:
                for _ in range(20):
                    await asyncio.sleep(0)  # until the deltas that may wait are as many as there can be
                break

    asyncio.run(asyncio.wait_for(leave(), 60))
    assert sorted(closed) == ["0", "1", "2"]


def test_the_error_of_one_output_ends_all():
    async def generate(generation):
        yield Delta("a", (1,))
        if generation.request_id == "1":
            raise ApiError("no room")
        await asyncio.Event().wait()

    async def read():
        async with aclosing(deltas_of(SimpleNamespace(generate=generate), GENERATIONS)) as deltas:
            async for _ in deltas:
                pass

    with pytest.raises(ApiError, match="no room"):
        asyncio.run(asyncio.wait_for(read(), 60))
