"""/v1/completions and /v1/chat/completions in front of a simulated fleet."""

import asyncio

import pytest

PATHS = {
    "/v1/completions": {"prompt": "Once upon a time"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Tell me a story."}]},
}
both = pytest.mark.parametrize("path", PATHS)


def text_of(choice):
    """Returns the text of a choice of any kind of response."""
    part = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
    return part["content"]


@pytest.mark.parametrize("n", [1, 3])
@both
def test_stream_and_whole_answer_are_equal(served, path, n):
    body = PATHS[path] | {"max_tokens": 20, "ignore_eos": True, "seed": 5, "n": n, "return_token_ids": True}

    async def test(client):
        status, whole = await client.post(path, body)
        events = await client.stream(path, body | {"stream_options": {"include_usage": True}})
        return status, whole, events

    status, whole, events = served(test)
    assert status == 200
    *chunks, last = events
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 20 * n
    for index, choice in enumerate(whole["choices"]):
        own = [each["choices"][0] for each in chunks if each["choices"][0]["index"] == index]
        assert "".join(map(text_of, own)) == text_of(choice)
        assert [token for each in own for token in each.get("token_ids", [])] == choice["token_ids"]
        assert [each["finish_reason"] for each in own] == [None] * (len(own) - 1) + ["length"]
        assert choice["finish_reason"] == "length"
    assert len({text_of(choice) for choice in whole["choices"]}) == n
    assert len({event["id"] for event in events}) == 1


def test_chat_stream_begins_with_the_role(served):
    async def test(client):
        return await client.stream("/v1/chat/completions", PATHS["/v1/chat/completions"] | {"max_tokens": 2})

    first = served(test)[0]
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}


@both
def test_usage_of_every_chunk_counts_up(served, path):
    options = {"include_usage": True, "continuous_usage_stats": True}

    async def test(client):
        return await client.stream(
            path, PATHS[path] | {"max_tokens": 9, "ignore_eos": True, "stream_options": options}
        )

    counts = [event["usage"]["completion_tokens"] for event in served(test)]
    assert counts == sorted(counts)
    assert counts[-1] == 9


def test_several_prompts_have_their_own_choices(served):
    async def test(client):
        return await client.post(
            "/v1/completions", {"prompt": ["a", "b c d e f g"], "n": 2, "max_tokens": 3, "echo": True}
        )

    status, body = served(test)
    assert status == 200
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert all(choice["text"].startswith("a") for choice in body["choices"][:2])
    assert all(choice["text"].startswith("b c d e f g") for choice in body["choices"][2:])


def test_logprobs_are_those_of_the_draw(served):
    async def test(client):
        completion = await client.post(
            "/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 4, "logprobs": 2}
        )
        chat = await client.post(
            "/v1/chat/completions",
            PATHS["/v1/chat/completions"] | {"max_tokens": 4, "logprobs": True, "top_logprobs": 3},
        )
        return completion[1], chat[1]

    completion, chat = served(test)
    logprobs = completion["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == completion["choices"][0]["text"]
    assert all(
        len(top) == 2 and token in top
        for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)
    )
    assert all(value < 0 for value in logprobs["token_logprobs"])
    content = chat["choices"][0]["logprobs"]["content"]
    assert "".join(each["token"] for each in content) == text_of(chat["choices"][0])
    assert all(len(each["top_logprobs"]) == 3 for each in content)


def test_echo_has_the_logprobs_of_the_prompt(served):
    body = {"prompt": "Once upon a time", "max_tokens": 4, "echo": True, "logprobs": 2, "seed": 1, "n": 2}

    async def test(client):
        whole = await client.post("/v1/completions", body)
        return whole[1], await client.stream("/v1/completions", body)

    whole, events = served(test)
    for index, choice in enumerate(whole["choices"]):
        logprobs = choice["logprobs"]
        assert "".join(logprobs["tokens"]) == choice["text"]
        assert len({len(values) for values in logprobs.values()}) == 1
        for token, start in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert choice["text"].startswith(token, start)
        assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
        assert all(value < 0 for value in logprobs["token_logprobs"][1:])
        own = [each["choices"][0] for each in events if each["choices"][0]["index"] == index]
        assert own[0]["text"] == body["prompt"]
        streamed = {name: [x for each in own for x in each["logprobs"][name]] for name in logprobs}
        assert streamed == logprobs


def test_stop_string_ends_the_text_before_it(served):
    async def test(client):
        body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True, "seed": 1}
        whole = (await client.post("/v1/completions", body))[1]["choices"][0]["text"]
        stop = whole.split()[5]
        stopped = (await client.post("/v1/completions", body | {"stop": [stop, "never"]}))[1]
        later = (await client.post("/v1/completions", body | {"stop": stop, "min_tokens": 30}))[1]
        return whole, stop, stopped["choices"][0], later

    whole, stop, choice, later = served(test)
    assert choice["text"] == whole[: whole.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert later["usage"]["completion_tokens"] > 30


def test_output_lengths_are_the_workloads(served):
    async def test(client):
        found = []
        for limits in ({"max_tokens": 1000}, {"max_tokens": 10}, {"max_tokens": 1000, "min_tokens": 300}):
            status, body = await client.post("/v1/completions", {"prompt": "x"} | limits)
            assert status == 200
            found.append((body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]))
        return found

    workload = ("workload=poisson", "workload.lengths.output_tokens.value=40")
    assert served(test, *workload) == [(40, "stop"), (10, "length"), (300, "stop")]


def test_second_turn_of_a_chat_finds_its_history_in_the_cache(served):
    async def test(client):
        messages = [{"role": "user", "content": "word " * 300}]
        body = {"max_tokens": 100, "ignore_eos": True}
        first = (await client.post("/v1/chat/completions", body | {"messages": messages}))[1]
        messages.append(first["choices"][0]["message"])
        messages.append({"role": "user", "content": "and then?"})
        again = (await client.post("/v1/chat/completions", body | {"messages": messages}))[1]
        salted = (
            await client.post("/v1/chat/completions", body | {"messages": messages, "cache_salt": "mine"})
        )[1]
        return [each["usage"] for each in (first, again, salted)]

    first, again, salted = served(test, "caching=prefix")
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    cached = again["prompt_tokens_details"]["cached_tokens"]
    assert first["total_tokens"] - 16 < cached < first["total_tokens"]
    assert salted["prompt_tokens_details"]["cached_tokens"] == 0


def test_request_id_of_the_client_is_kept(served):
    async def test(client):
        body = {"prompt": "x", "max_tokens": 1}
        async with client.client.post(
            "/v1/completions", json=body, headers={"X-Request-Id": "mine"}
        ) as response:
            return response.headers["X-Request-Id"], (await response.json())["id"]

    assert served(test) == ("cmpl-mine", "cmpl-mine")


def test_tokenize_and_detokenize_are_inverse(served):
    async def test(client):
        status, found = await client.post("/tokenize", {"prompt": "Grüße, 世界!"})
        assert status == 200
        assert found["count"] == len(found["tokens"])
        return (await client.post("/detokenize", {"tokens": found["tokens"]}))[1]["prompt"]

    assert served(test) == "Grüße, 世界!"


def test_client_that_goes_frees_its_request(served):
    async def test(client):
        body = {"prompt": "x", "max_tokens": 100_000, "ignore_eos": True, "stream": True}
        response = await client.client.post("/v1/completions", json=body)
        await response.content.readany()
        assert client.fleet.num_in_progress == 1
        response.close()
        for _ in range(60_000):
            await asyncio.sleep(0.01)
            if not client.fleet.simulation.num_in_progress:
                return client.fleet.num_in_progress
        raise AssertionError("the request goes on without its client")

    assert served(test) == 0


BAD = {
    "no JSON": (b"{", 400, None),
    "wrong UTF-8": (b'{"prompt": "\xff"}', 400, None),
    "a list": (b"[]", 400, None),
    "no prompt": ({}, 400, "prompt"),
    "empty prompt": ({"prompt": ""}, 400, "prompt"),
    "no prompts": ({"prompt": []}, 400, "prompt"),
    "NaN": (b'{"prompt": "x", "temperature": NaN}', 400, "temperature"),
    "infinity": (b'{"prompt": "x", "temperature": 1e999}', 400, "temperature"),
    "negative": ({"prompt": "x", "max_tokens": -1}, 400, "max_tokens"),
    "negative token": ({"prompt": [-1]}, 400, "prompt"),
    "n": ({"prompt": "x", "n": 1000}, 400, "n"),
    "top_p": ({"prompt": "x", "top_p": 0}, 400, "top_p"),
    "stream_options": ({"prompt": "x", "stream_options": {}}, 400, None),
    "logprobs": ({"prompt": "x", "logprobs": -1}, 400, "logprobs"),
    "empty stop": ({"prompt": "x", "stop": [""]}, 400, None),
    "beam search": ({"prompt": "x", "use_beam_search": True, "n": 2}, 400, "use_beam_search"),
    "too long": ({"prompt": [1] * 200_000}, 400, "prompt"),
    "long text": ({"prompt": "x" * 10_000_000}, 400, "prompt"),
    "max_tokens": ({"prompt": "x", "max_tokens": 10_000_000}, 400, "max_tokens"),
    "min_tokens": ({"prompt": "x", "max_tokens": 5, "min_tokens": 6}, 400, "min_tokens"),
    "model": ({"prompt": "x", "model": "nope"}, 404, "model"),
    "priority": ({"prompt": "x", "priority": 3}, 400, "priority"),
    "priority of 2^63": ({"prompt": "x", "priority": 1 << 63}, 400, "priority"),
    "seed of 2^64": ({"prompt": "x", "seed": 1 << 64}, 400, "seed"),
    "max_tokens of 4,000 digits": (
        b'{"prompt": "x", "max_tokens": 1' + b"0" * 4000 + b"}",
        400,
        "max_tokens",
    ),
    "an integer of 5,000 digits": (b'{"prompt": "x", "top_k": 1' + b"0" * 5000 + b"}", 400, "top_k"),
    "many outputs": ({"prompt": ["x"] * 1000, "n": 128, "max_tokens": 100_000}, 400, "n"),
    "many stop strings": ({"prompt": "x", "stop": ["a"] * 65}, 400, "stop"),
    "a long user": ({"prompt": "x", "user": "a" * 10_000}, 400, "user"),
    "a long salt": ({"prompt": "x", "cache_salt": "a" * 10_000}, 400, "cache_salt"),
    "deep": (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, None),
    "a lone surrogate": (b'{"prompt": "\\ud800"}', 400, None),
}


@pytest.mark.parametrize(("body", "status", "param"), BAD.values(), ids=BAD)
def test_bad_request_has_an_error_object(served, body, status, param):
    async def test(client):
        before = client.fleet.num_in_progress
        found = await client.post("/v1/completions", body)
        assert client.fleet.num_in_progress == before
        return found

    found, answer = served(test)
    error = answer["error"]
    assert found == error["code"] == status
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] is None or param is None or error["param"].startswith(param)
    assert len(error["message"]) < 500


def test_unknown_route_method_and_key(served):
    async def test(client):
        return [
            (await client.get("/nope"))[0],
            (await client.get("/v1/completions"))[0],
            (await client.get("/health"))[0],
            (await client.get("/v1/models"))[0],
            (await client.get("/v1/models", Authorization="Bearer wrong"))[0],
            (await client.get("/v1/models", Authorization="Bearer right"))[0],
        ]

    assert served(test, api_key="right") == [401, 401, 200, 401, 401, 200]
    assert served(test) == [404, 405, 200, 200, 200, 200]
