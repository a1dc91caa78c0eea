"""The routes of the sleep mode, over the real engine."""

from __future__ import annotations

import asyncio

import pytest

PATH = "/v1/completions"
BODY = {"prompt": "A text of several blocks, which the cache has", "max_tokens": 6, "temperature": 0}


async def posted(client, path):
    async with client.client.post(path) as response:
        return response.status, await response.text()


async def is_sleeping(client):
    return (await client.get("/is_sleeping"))[1]["is_sleeping"]


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_sleeps_and_wakes_with_its_texts_and_an_empty_cache(engine_served, level):
    async def test(client):
        before = [(await client.post(PATH, BODY))[1] for _ in range(2)][1]
        assert before["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert not await is_sleeping(client)
        assert (await posted(client, f"/sleep?level={level}"))[0] == 200
        assert await is_sleeping(client)
        assert (await client.get("/health"))[0] == 200
        waiting = asyncio.create_task(client.post(PATH, BODY))
        assert (await posted(client, "/wake_up?tags=weights"))[0] == 200
        assert await is_sleeping(client), "the KV sleeps on, and with it the engine"
        assert not waiting.done()
        assert (await posted(client, "/wake_up?tags=kv_cache"))[0] == 200
        assert not await is_sleeping(client)
        status, after = await waiting
        assert status == 200
        assert after["choices"] == before["choices"]
        assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    engine_served(test, enable_sleep_mode=True)


def test_requests_in_progress_are_aborted(engine_served):
    async def test(client):
        stream = asyncio.create_task(client.post(PATH, BODY | {"max_tokens": 200, "ignore_eos": True}))
        while not client.fleet.num_in_progress:
            await asyncio.sleep(0.001)
        await posted(client, "/sleep")
        status, body = await stream
        assert status == 200
        assert body["choices"][0]["finish_reason"] == "abort"
        await posted(client, "/wake_up")

    engine_served(test, enable_sleep_mode=True)


def test_memory_that_others_have_taken_is_told_and_the_engine_sleeps_on(engine_served, monkeypatch):
    async def test(client):
        await posted(client, "/sleep")

        def fail(weights):
            raise ValueError("num_kv_blocks=100: the CPU has no memory")

        monkeypatch.setattr(client.llm._sleep_mode, "_build", fail)
        status, body = await posted(client, "/wake_up")
        assert status == 500
        assert "the CPU has no memory" in body
        assert await is_sleeping(client)

    engine_served(test, enable_sleep_mode=True)
