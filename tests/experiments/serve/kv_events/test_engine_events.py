"""A subscriber of the real engine's KV events knows what its prefix cache holds."""

import asyncio

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("zmq", reason="needs the extra serve: pip install 'windtunnel[serve]'")
pytest.importorskip("msgspec", reason="needs the extra serve: pip install 'windtunnel[serve]'")

import torch
import zmq.asyncio
from aiohttp.test_utils import TestClient, TestServer

from experiments.serve.driver import make_application
from experiments.serve.kv_events.block_chain import BlockChain
from sim.settings.errors import ConfigError
from tests.experiments.serve.engine.test_job import TINY, prepared
from tests.worlds.kv_events import KnownBlocks
from tests.worlds.serving import complete

torch.set_num_threads(1)
ON = (
    *TINY,
    "serve.kv_events.enable_kv_cache_events=true",
    "serve.kv_events.endpoint=tcp://127.0.0.1:0",
    "engine.num_kv_blocks=17",
)


@pytest.mark.parametrize("caching", ["prefix", "radix"])
def test_the_index_has_what_later_requests_find(caching):
    """usage.cached_tokens of a request is what the index had before it."""
    block_size = 16

    async def run():
        job = prepared(*ON, f"caching={caching}", f"caching.block_size={block_size}")
        context = zmq.asyncio.Context()
        async with job.publishing() as publish:
            backend = job.backend(publish)
            async with TestClient(TestServer(make_application(job.front(backend), job.setup))) as client:
                llm = await backend.start()
                job.observed(backend, llm)
                backend.open()
                known = await KnownBlocks.subscribe(context, job_publisher(llm))
                known.came_late = True  # after the warm-up
                hits = []
                history = {seed: [(seed * 31 + place) % 250 for place in range(50)] for seed in range(4)}
                for turn in range(16):
                    seed = turn * 7 % 4
                    prompt = [*history[seed], turn, turn + 1, turn + 2]
                    await known.catch_up()
                    chain = BlockChain(prompt, block_size)
                    expected = block_size * known.num_found("GPU", chain, len(prompt) - 1)
                    fields = {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
                    status, body = await complete(client, prompt, **fields)
                    assert status == 200
                    hits.append(body["usage"]["prompt_tokens_details"]["cached_tokens"])
                    assert hits[-1] == expected
                    history[seed] = [*prompt, *body["choices"][0]["token_ids"]]
                    while backend.num_in_progress:
                        await asyncio.sleep(0.01)
                    await asyncio.sleep(0.05)
                assert any(hits)
                assert known.num_removed > 0
                await backend.stop()
        context.destroy(linger=0)

    asyncio.run(asyncio.wait_for(run(), 200))


def job_publisher(llm):
    return llm.engine.observer._observers[-1]._publisher


def test_a_cache_without_contents_is_an_error_of_the_user():
    async def run():
        job = prepared(*ON, "caching=paged")
        async with job.publishing() as publish:
            with pytest.raises((ValueError, ConfigError), match="no prefix cache"):
                await job.backend(publish).start()

    asyncio.run(run())
