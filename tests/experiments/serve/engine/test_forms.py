"""The real engine does with tools, forms and other APIs what it says, or answers with status 400."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("aiohttp")

from experiments.serve.server import Stop, serve_app
from experiments.serve.settings import Address

CHAT = {
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 4,
    "temperature": 0,
    "ignore_eos": True,
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,x"}}
REFUSED = [
    ("/v1/chat/completions", CHAT | {"tools": TOOLS}, "messages"),  # its template has no place for tools
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": [PART]}]}, "messages"),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {"structural_tag": {}}}, "structured_outputs"),
    ("/v1/completions", {"prompt": "a", "bad_words": ["b"]}, "bad_words"),
    ("/v1/embeddings", {"input": "a"}, "model"),
    ("/generate", {"text": "a", "sampling_params": {"structural_tag": {}}}, "sampling_params"),
]


def test_what_the_engine_does_not_do_is_refused_by_field(engine_served):
    async def test(client):
        return [await client.post(path, body) for path, body, _ in REFUSED]

    for (path, body, param), (status, answer) in zip(REFUSED, engine_served(test), strict=True):
        assert (status, answer["error"]["param"]) == (400, param), (path, body, answer)


def test_other_apis_have_the_tokens_of_a_chat(engine_served):
    async def test(client):
        chat = await client.post("/v1/chat/completions", CHAT)
        more = {"temperature": 0, "ignore_eos": True}
        response = await client.post("/v1/responses", more | {"input": "Hi", "max_output_tokens": 4})
        message = await client.post("/v1/messages", CHAT)
        params = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
        plain = await client.post("/v1/completions", {"prompt": "Hi", "max_tokens": 4} | more)
        generated = await client.post("/generate", {"text": "Hi", "sampling_params": params})
        return [body for _, body in (chat, response, message, plain, generated)]

    chat, response, message, plain, generated = engine_served(test)
    text = chat["choices"][0]["message"]["content"]
    assert response["output"][0]["content"][0]["text"] == message["content"][0]["text"] == text
    assert generated["text"] == plain["choices"][0]["text"]


def test_prompt_logprobs_and_a_prompt_only(engine_served):
    async def test(client):
        body = {"prompt": [1, 2, 3], "max_tokens": 0, "echo": True, "prompt_logprobs": 1}
        return await client.post("/v1/completions", body)

    status, body = engine_served(test)
    assert status == 200, body
    known = body["choices"][0]["prompt_logprobs"]
    assert known[0] is None
    assert all(str(token) in each for token, each in zip([2, 3], known[1:], strict=True))
    assert body["usage"]["completion_tokens"] == 0


def test_a_server_whose_engine_sleeps_stops_at_once(engine_served):
    """A request that waits for the wake-up cannot end."""

    async def test(client):
        await client.llm.sleep(1)
        stop, ready = Stop(), asyncio.get_running_loop().create_future()
        waiting = asyncio.create_task(client.post("/v1/completions", {"prompt": "a"}))
        while not client.fleet.num_in_progress:
            await asyncio.sleep(0.01)
        server = serve_app(
            client.client.app,
            Address(port=0),
            stop,
            duration_s=None,
            drain_s=1000,
            num_in_progress=lambda: client.fleet.num_in_progress,
            on_ready=ready.set_result,
            is_asleep=lambda: client.fleet.is_asleep,
        )
        serving = asyncio.create_task(server)
        await ready
        stop.set()
        await asyncio.wait_for(serving, 30)
        assert client.fleet.is_asleep
        await client.llm.wake_up()
        assert (await waiting)[0] == 200
        assert not client.fleet.is_asleep

    engine_served(test, enable_sleep_mode=True)
