"""Responses, Messages, Embeddings, and SGLang's and vLLM's generate: each in its own form, over one core."""

from __future__ import annotations

import base64
import json
import struct
from itertools import pairwise

import pytest

pytest.importorskip("aiohttp", reason="needs the extra serve: pip install 'windtunnel[serve]'")

from tests.experiments.serve.test_forms import TOOLS, WEATHER

RESPONSES = {"input": "hi", "max_output_tokens": 6, "ignore_eos": True, "seed": 1}
MESSAGES = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "ignore_eos": True, "seed": 1}
WEATHER_TOOL = TOOLS[0]["function"]


async def events_of(client, path, body):
    """Returns the names and bodies of the events of a stream."""
    async with client.client.post(path, json=body | {"stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        blocks = (await response.text()).split("\n\n")
    assert blocks.pop() == ""
    found = []
    for block in blocks:
        name, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert value["type"] == name.removeprefix("event: ")
        found.append(value)
    return found


def test_a_response_is_streamed_as_it_is_given_as_a_whole(served):
    async def test(client):
        return await client.post("/v1/responses", RESPONSES), await events_of(
            client, "/v1/responses", RESPONSES
        )

    (status, whole), events = served(test)
    assert status == 200, whole
    (item,) = whole["output"]
    text = item["content"][0]["text"]
    assert (whole["object"], whole["status"], item["type"]) == ("response", "incomplete", "message")
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert whole["usage"]["output_tokens"] == 6
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "".join(event["delta"] for event in events if event["type"].endswith("text.delta")) == text
    last = events[-1]["response"]
    assert (last["output"][0]["content"][0]["text"], last["usage"]) == (text, whole["usage"])


def test_a_response_calls_tools_and_takes_their_results(served):
    tool = {"type": "function"} | WEATHER_TOOL
    body = {"input": "hi", "tools": [tool], "tool_choice": "required", "seed": 1, "max_output_tokens": 200}

    async def test(client):
        whole = await client.post("/v1/responses", body)
        events = await events_of(client, "/v1/responses", body)
        call = whole[1]["output"][0]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
        items = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}, call, output]
        return (
            whole,
            events,
            await client.post("/v1/responses", body | {"input": items, "tool_choice": "none"}),
        )

    (status, whole), events, (then, answer) = served(test, output_length="max_tokens")
    assert (status, then) == (200, 200), (whole, answer)
    (call,) = whole["output"]
    assert (call["type"], call["name"], call["status"]) == ("function_call", "get_weather", "completed")
    assert set(json.loads(call["arguments"])) == set(WEATHER["required"])
    deltas = [each["delta"] for each in events if each["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call["arguments"]
    assert events[-1]["response"]["output"][0]["arguments"] == call["arguments"]
    assert answer["output"][0]["type"] == "message"
    assert answer["usage"]["input_tokens"] > whole["usage"]["input_tokens"]


def test_a_response_has_the_form_that_its_text_asks_for(served):
    wanted = {"format": {"type": "json_schema", "name": "w", "schema": WEATHER}}

    async def test(client):
        return await client.post("/v1/responses", {"input": "hi", "text": wanted, "max_output_tokens": 200})

    status, whole = served(test)
    assert status == 200, whole
    assert set(json.loads(whole["output"][0]["content"][0]["text"])) == set(WEATHER["required"])


def test_a_message_is_streamed_as_it_is_given_as_a_whole(served):
    async def test(client):
        return await client.post("/v1/messages", MESSAGES), await events_of(client, "/v1/messages", MESSAGES)

    (status, whole), events = served(test)
    assert status == 200, whole
    assert (whole["type"], whole["role"], whole["stop_reason"]) == ("message", "assistant", "max_tokens")
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    assert text == whole["content"][0]["text"]
    assert events[0]["message"]["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert events[-2]["usage"] == whole["usage"]
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"


def test_a_message_uses_tools_and_takes_their_results(served):
    tool = {"name": "get_weather", "input_schema": WEATHER}
    body = {
        "messages": MESSAGES["messages"],
        "max_tokens": 200,
        "tools": [tool],
        "tool_choice": {"type": "any"},
    }

    async def test(client):
        whole = await client.post("/v1/messages", body | {"seed": 1})
        events = await events_of(client, "/v1/messages", body | {"seed": 1})
        use = whole[1]["content"][0]
        result = {
            "type": "tool_result",
            "tool_use_id": use["id"],
            "content": [{"type": "text", "text": "rain"}],
        }
        turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        later = body | {"messages": body["messages"] + turns, "tool_choice": {"type": "none"}}
        count = {key: value for key, value in later.items() if key != "max_tokens"}
        return (
            whole,
            events,
            await client.post("/v1/messages", later),
            await client.post("/v1/messages/count_tokens", count),
        )

    (status, whole), events, (then, answer), (_, count) = served(test, output_length="max_tokens")
    assert (status, then) == (200, 200), (whole, answer)
    (use,) = whole["content"]
    assert (use["type"], use["name"], whole["stop_reason"]) == ("tool_use", "get_weather", "tool_use")
    assert set(use["input"]) == set(WEATHER["required"])
    parts = [each["delta"]["partial_json"] for each in events if each["type"] == "content_block_delta"]
    assert json.loads("".join(parts)) == use["input"]
    assert answer["content"][0]["type"] == "text"
    assert count == {"input_tokens": answer["usage"]["input_tokens"]}


def test_stop_sequences_and_systems_of_messages(served):
    async def test(client):
        body = MESSAGES | {"max_tokens": 60, "system": [{"type": "text", "text": "be brief " * 20}]}
        whole = (await client.post("/v1/messages", body))[1]
        word = whole["content"][0]["text"].split()[3]
        return whole, word, (await client.post("/v1/messages", body | {"stop_sequences": [word]}))[1]

    whole, word, stopped = served(test, output_length="max_tokens")
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", word)
    assert whole["content"][0]["text"].startswith(stopped["content"][0]["text"])
    assert whole["usage"]["input_tokens"] > 40


def test_embeddings_have_the_size_of_the_model_and_the_time_of_a_prefill(served):
    async def test(client):
        both = await client.post("/v1/embeddings", {"input": ["a b", "c", "a b"], "dimensions": None})
        packed = await client.post(
            "/v1/embeddings", {"input": [[1, 2, 3]], "encoding_format": "base64", "dimensions": 8}
        )
        return both, packed, client.fleet.simulation.requests.output_tokens[0]

    (status, body), (_, packed), num_tokens = served(test)
    assert status == 200, body
    first, other, again = (each["embedding"] for each in body["data"])
    assert (len(first), sum(value * value for value in first)) == (4096, pytest.approx(1, abs=1e-4))
    assert first == again != other
    assert body["usage"]["completion_tokens"] == 0
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == 5
    assert len(struct.unpack("<8f", base64.b64decode(packed["data"][0]["embedding"]))) == 8
    assert num_tokens == 1


def test_generate_of_sglang(served):
    params = {"max_new_tokens": 5, "ignore_eos": True, "sampling_seed": 1}
    body = {"text": "hi there", "sampling_params": params, "return_logprob": True}

    async def test(client):
        return [
            await client.post("/generate", body),
            await client.post("/generate", {"input_ids": [[1, 2], [3]], "sampling_params": params}),
            await client.post("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 0}}),
            await client.post("/generate", {"text": "x", "sampling_params": {"regex": "[ab]{9}"}}),
        ], await client.stream("/generate", body)

    answers, events = served(test)
    assert [status for status, _ in answers] == [200] * 4
    (_, one), (_, many), (_, none), (_, matched) = answers
    meta = one["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert (meta["prompt_tokens"], meta["completion_tokens"], len(one["output_ids"])) == (2, 5, 5)
    assert [token for _, token, _ in meta["output_token_logprobs"]] == one["output_ids"]
    assert [each["meta_info"]["prompt_tokens"] for each in many] == [2, 1]
    assert (none["text"], none["meta_info"]["completion_tokens"]) == ("", 0)
    assert set(matched["text"]) <= {"a", "b"}
    assert events[-1]["text"] == one["text"]
    assert all(later["text"].startswith(event["text"]) for event, later in pairwise(events))
    assert events[-1]["meta_info"]["completion_tokens"] == 5


def test_generate_of_vllm(served):
    body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4, "ignore_eos": True, "seed": 1}}

    async def test(client):
        return await client.post("/inference/v1/generate", body), await client.stream(
            "/inference/v1/generate", body
        )

    (status, whole), events = served(test)
    assert status == 200, whole
    (choice,) = whole["choices"]
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (4, "length")
    assert [token for event in events for token in event["choices"][0]["token_ids"]] == choice["token_ids"]


def image(url):
    return {"type": "image_url", "image_url": {"url": url}}


def test_images_have_tokens_and_are_found_in_the_cache(served):
    def ask(url):
        parts = [{"type": "text", "text": "what is"}, image(url), {"type": "text", "text": "this?"}]
        return {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}

    async def test(client):
        found = []
        for url in ("data:image/png;base64,iVBO", "data:image/png;base64,iVBO", "https://example.com/a.png"):
            found.append((await client.post("/v1/chat/completions", ask(url)))[1]["usage"])
        text = [{"role": "user", "content": "what is this?"}]
        found.append(
            (await client.post("/v1/chat/completions", {"messages": text, "max_tokens": 2}))[1]["usage"]
        )
        source = {"type": "base64", "media_type": "image/png", "data": "iVBO"}
        block = {"role": "user", "content": [{"type": "image", "source": source}]}
        found.append((await client.post("/v1/messages", {"messages": [block], "max_tokens": 2}))[1]["usage"])
        many = await client.post(
            "/v1/chat/completions",
            ask("x") | {"messages": [{"role": "user", "content": [image("x")] * 2000}]},
        )
        return found, many

    (first, again, other, text, block), (status, error) = served(test, "caching=prefix", image_tokens=100)
    assert 99 <= first["prompt_tokens"] - text["prompt_tokens"] <= 102
    assert again["prompt_tokens_details"]["cached_tokens"] > 90
    assert other["prompt_tokens_details"]["cached_tokens"] < 32
    assert block["input_tokens"] > 100
    assert (status, error["error"]["param"]) == (400, "messages")


WRONG = [
    ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
    ("/v1/responses", {"input": "x", "max_output_tokens": 10**9}, "max_output_tokens"),
    ("/v1/responses", {"input": "x", "min_tokens": -1}, "min_tokens"),
    ("/v1/responses", {"input": "x", "logit_bias": {"1": 1}}, "logit_bias"),
    ("/v1/responses", {"input": "x", "tools": [{"type": "web_search"}]}, "tools"),
    ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    ("/v1/responses", {"input": [{"role": "robot", "content": "x"}]}, "input"),
    ("/v1/embeddings", {"input": ""}, "input"),
    ("/v1/embeddings", {"input": "x", "dimensions": 10**6}, "dimensions"),
    ("/v1/embeddings", {"input": [-1]}, "input"),
    ("/generate", {"text": "x", "input_ids": [1]}, "text"),
    ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
    ("/generate", {"text": "x", "sampling_params": {"ebnf": "root"}}, "sampling_params"),
    ("/generate", {"text": "x", "image_data": "x"}, "image_data"),
    ("/inference/v1/generate", {"token_ids": []}, "token_ids"),
    ("/inference/v1/generate", {"token_ids": ["x"]}, "token_ids"),
]


def test_wrong_requests_name_their_own_fields(served):
    async def test(client):
        message = await client.post("/v1/messages", MESSAGES | {"max_tokens": 0})
        return [await client.post(path, body) for path, body, _ in WRONG], message

    found, (status, message) = served(test)
    for (path, body, param), (code, answer) in zip(WRONG, found, strict=True):
        assert code == 400, (path, body, answer)
        assert str(answer["error"]["param"]).startswith(param), (path, body, answer)
    assert (status, message["type"], message["error"]["type"]) == (400, "error", "invalid_request_error")


LONG = "word " * 3000
TOO_LONG = {
    "/v1/completions": {"prompt": LONG, "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4},
    "/v1/responses": {"input": LONG, "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4},
    "/v1/embeddings": {"input": LONG},
    "/generate": {"text": LONG},
    "/inference/v1/generate": {"token_ids": [1] * 3000},
}


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_context_is_refused_before_a_stream_begins(served, stream):
    async def test(client):
        more = {"stream": True} if stream else {}
        return [
            await client.post(path, body | (more if path != "/v1/embeddings" else {}))
            for path, body in TOO_LONG.items()
        ]

    for path, (status, answer) in zip(TOO_LONG, served(test, "engine.max_model_len=1400"), strict=True):
        assert status == 400, path
        assert "1400" in answer["error"]["message"], path
