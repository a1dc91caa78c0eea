"""The API in front of the real engine gives the engine's own tokens, and leaves nothing behind."""

import asyncio
import random
from itertools import combinations

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("aiohttp")

from realengine.serving.sampling_params import SamplingParams
from tests.experiments.serve.engine.conftest import tiny_model
from tests.realengine.adapters import random_adapter

PATH = "/v1/completions"
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def prompts(num=12):
    generator = random.Random(5)
    return [[generator.randrange(299) for _ in range(generator.randint(1, 60))] for _ in range(num)]


async def until(holds):
    for _ in range(60_000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came true")


def test_answers_are_the_tokens_of_the_offline_engine(engine_served, offline):
    async def test(client):
        bodies = [GREEDY | {"prompt": prompt} for prompt in prompts()]
        wholes = await asyncio.gather(*(client.post(PATH, body) for body in bodies))
        streams = await asyncio.gather(*(client.stream(PATH, body) for body in bodies))
        return wholes, streams

    wholes, streams = engine_served(test)
    expected = [output.outputs[0] for output in offline.generate(prompts(), PARAMS)]
    for own, (status, whole), events in zip(expected, wholes, streams, strict=True):
        assert status == 200
        (choice,) = whole["choices"]
        assert (tuple(choice["token_ids"]), choice["text"]) == (own.token_ids, own.text)
        assert choice["finish_reason"] == "length"
        chunks = [event["choices"][0] for event in events]
        assert "".join(chunk["text"] for chunk in chunks) == own.text
        assert tuple(token for chunk in chunks for token in chunk["token_ids"]) == own.token_ids


def test_batches_of_prompts_and_several_outputs(engine_served, offline):
    body = {"prompt": prompts()[:3], "n": 2, "seed": 7, "max_tokens": 6, "ignore_eos": True}

    async def test(client):
        return await client.post(PATH, body | {"return_token_ids": True})

    status, found = engine_served(test)
    assert status == 200
    for place, prompt in enumerate(prompts()[:3]):
        for index in range(2):
            params = SamplingParams(seed=7 + index, max_tokens=6, ignore_eos=True)
            own = offline.generate([prompt], params)[0].outputs[0].token_ids
            assert tuple(found["choices"][2 * place + index]["token_ids"]) == own
    assert found["usage"]["completion_tokens"] == 36


def test_chat_logprobs_and_echo(engine_served, offline):
    messages = [{"role": "user", "content": "Hello"}]
    body = {"messages": messages, "logprobs": True, "top_logprobs": 3, "temperature": 0, "max_tokens": 5}

    async def test(client):
        chat = await client.post("/v1/chat/completions", body)
        echo = await client.post(PATH, {"prompt": "Hello", "echo": True, "max_tokens": 2, "temperature": 0})
        return chat, echo

    (status, chat), (_, echo) = engine_served(test)
    assert status == 200
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=3)
    own = offline.generate([offline.tokenizer.apply_chat(messages)], params)[0].outputs[0]
    content = chat["choices"][0]["logprobs"]["content"]
    assert [each["logprob"] for each in content] == pytest.approx([each.logprob for each in own.logprobs])
    tops = [[top["logprob"] for top in each["top_logprobs"]] for each in content]
    assert tops == [pytest.approx(list(each.top.values())) for each in own.logprobs]
    assert echo["choices"][0]["text"].startswith("Hello")


def test_echo_has_the_logprobs_of_the_prompt(engine_served, offline):
    prompt = [*b"Once upon a time there was a prompt"]
    body = {"prompt": [prompt, prompt[:3]], "max_tokens": 3, "echo": True, "logprobs": 2, "temperature": 0}

    async def test(client):
        await client.post(PATH, {"prompt": prompt, "max_tokens": 1})  # its KV is in the cache
        whole = await client.post(PATH, body)
        return whole, await client.stream(PATH, body | {"prompt": prompt})

    (status, whole), events = engine_served(test)
    assert status == 200
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=2)
    for own, choice in zip(offline.generate(body["prompt"], params), whole["choices"], strict=True):
        logprobs, known = choice["logprobs"], [*own.prompt_logprobs[1:], *own.outputs[0].logprobs]
        assert "".join(logprobs["tokens"]) == choice["text"]
        assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
        assert logprobs["token_logprobs"][1:] == pytest.approx([each.logprob for each in known], abs=1e-5)
    streamed = [value for each in events for value in each["choices"][0]["logprobs"]["token_logprobs"]]
    assert streamed == pytest.approx(whole["choices"][0]["logprobs"]["token_logprobs"])


def test_reasons_of_an_end(engine_served, offline):
    prompt = prompts()[0]
    (own,) = offline.generate([prompt], PARAMS)[0].outputs
    token = own.token_ids[4]
    num = own.token_ids.index(token) + 1
    body = GREEDY | {"prompt": prompt, "stop_token_ids": [token]}

    async def test(client):
        return [
            await client.post(PATH, body | more)
            for more in ({}, {"min_tokens": 12}, {"stop_token_ids": None, "stop": own.text[:2]})
        ]

    (_, by_token), (_, at_length), (_, by_string) = engine_served(test)
    choice = by_token["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token)
    assert by_token["usage"]["completion_tokens"] == num
    choice = at_length["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    assert token not in choice["token_ids"]
    choice = by_string["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"], choice["text"]) == ("stop", own.text[:2], "")


def test_usage_has_the_cached_tokens_and_salts_separate_them(engine_served):
    async def test(client):
        found = []
        for salt in (None, None, "a", "b", "a"):
            _, body = await client.post(PATH, GREEDY | {"prompt": list(range(64)), "cache_salt": salt})
            found.append(body["usage"]["prompt_tokens_details"]["cached_tokens"])
        return found

    assert engine_served(test) == [0, 48, 0, 0, 48]


def test_adapters_are_models(engine_served):
    model = tiny_model()
    adapter = random_adapter(model.architecture, 4, scaling=50.0)

    async def test(client):
        _, models = await client.get("/v1/models")
        answers = [
            await client.post(PATH, GREEDY | {"prompt": [1, 2, 3], "model": name}) for name in ("tiny", "sql")
        ]
        return models, answers, await client.post(PATH, {"prompt": "a", "model": "other"})

    models, answers, (unknown, _) = engine_served(
        test, adapters=["sql"], lora_adapters={"sql": adapter}, model=model
    )
    assert [(each["id"], each["parent"]) for each in models["data"]] == [("tiny", None), ("sql", "tiny")]
    base, tuned = (body["choices"][0]["token_ids"] for _, body in answers)
    assert base != tuned
    assert unknown == 404


def test_adapters_are_unloaded_and_loaded_by_name(engine_served):
    model = tiny_model()
    adapter = random_adapter(model.architecture, 4, scaling=50.0)

    async def test(client):
        async def change(verb, name):
            body = {"lora_name": name, "lora_path": "/etc/passwd"}  # a path is never read
            async with client.client.post(f"/v1/{verb}_lora_adapter", json=body) as response:
                return response.status

        async def answered():
            body = GREEDY | {"prompt": [1, 2, 3], "model": "sql"}
            status, answer = await client.post(PATH, body)
            return status, answer["choices"][0]["token_ids"] if status == 200 else None

        steps = [("load", "sql"), ("unload", "sql"), ("unload", "sql"), ("load", "other"), ("load", "sql")]
        found = [await answered()]
        for verb, name in steps:
            found += [await change(verb, name), await answered()]
        return found

    found = engine_served(test, adapters=["sql"], lora_adapters={"sql": adapter}, model=model)
    there, gone = found[0], (404, None)
    assert found == [there, 400, there, 200, gone, 404, gone, 404, gone, 200, there]
    assert there[0] == 200


WRONG = [
    ({"prompt": [299, 300]}, 400, "300"),
    ({"prompt": ""}, 400, "empty"),
    ({"prompt": [1] * 256}, 400, "context"),
    ({"prompt": "a", "priority": 3}, 400, "priority"),
    ({"prompt": "a", "min_tokens": 30, "max_tokens": 3}, 400, "min_tokens"),
    ({"prompt": "a", "temperature": -1}, 400, "temperature"),
    (b'{"prompt": "a", "temperature": NaN}', 400, ""),
    (b"\xff", 400, ""),
]


def test_wrong_requests_leave_others_untouched(engine_served, offline):
    async def test(client):
        good = [asyncio.create_task(client.post(PATH, GREEDY | {"prompt": each})) for each in prompts()]
        wrong = await asyncio.gather(*(client.post(PATH, body) for body, _, _ in WRONG))
        return wrong, await asyncio.gather(*good)

    wrong, good = engine_served(test)
    for (body, status, word), (found, error) in zip(WRONG, wrong, strict=True):
        assert found == status, (body, error)
        assert word in error["error"]["message"], (body, error)
    expected = [output.outputs[0].token_ids for output in offline.generate(prompts(), PARAMS)]
    assert [tuple(body["choices"][0]["token_ids"]) for _, body in good] == expected


HOSTILE = {
    "temperature": [1000, 5e-324, 1e-40],
    "top_p": [5e-324, 1e-7],
    "top_k": [1, (1 << 63) - 1],
    "min_p": [1.0, 5e-324],
    "repetition_penalty": [0.001, 1000],
    "seed": [-(1 << 63), (1 << 63) - 1],
    "stop_token_ids": [list(range(300)), [2**31 - 1]],
}


def test_extreme_sampling_leaves_the_engine_well(engine_served):
    """In all pairs: a temperature of 1e308 with a penalty made logits NaN, and the engine died."""
    extremes = [(name, value) for name, values in HOSTILE.items() for value in values]
    pairs = [{a: x, b: y} for (a, x), (b, y) in combinations(extremes, 2) if a != b]

    async def test(client):
        before = await client.post(PATH, GREEDY | {"prompt": "a"})
        sampled = {"prompt": [1, 2, 3], "max_tokens": 3, "min_tokens": 3, "temperature": 1.0, "n": 2}
        found = [await client.post(PATH, sampled | pair) for pair in pairs]
        too_far = [
            await client.post(PATH, sampled | {name: value})
            for name in ("temperature", "repetition_penalty")
            for value in (1e4, 1e308)
        ]
        return before, found, too_far, await client.post(PATH, GREEDY | {"prompt": "a"})

    before, found, too_far, after = engine_served(test)
    assert [(pair, body) for pair, (status, body) in zip(pairs, found, strict=True) if status != 200] == []
    assert {status for status, _ in too_far} == {400}
    assert before[1]["choices"] == after[1]["choices"]


def test_a_request_without_room_for_its_kv_is_refused(engine_served):
    async def test(client):
        return await client.post(PATH, {"prompt": [1] * 200, "max_tokens": 20})

    status, error = engine_served(test, num_kv_blocks=3)
    assert status == 400
    assert "KV" in error["error"]["message"]


def test_a_client_that_leaves_frees_its_kv(engine_served):
    async def test(client):
        core = client.llm.engine.core
        body = {"prompt": [1, 2, 3], "max_tokens": 200, "ignore_eos": True, "stream": True}
        response = await client.client.post(PATH, json=body)
        await response.content.readline()
        assert client.fleet.num_in_progress == 1
        response.close()
        await until(lambda: client.llm.num_unfinished == 0)
        await until(lambda: core.block_pool.num_used == 0)
        whole = asyncio.create_task(client.post(PATH, body | {"stream": False, "n": 2}))
        await until(lambda: client.llm.num_unfinished == 2)
        whole.cancel()
        await until(lambda: core.block_pool.num_used == 0)
        core.check_integrity()

    engine_served(test)


def test_a_full_queue_refuses_with_503(engine_served):
    async def test(client):
        body = GREEDY | {"prompt": [1, 2, 3], "max_tokens": 200}
        return await asyncio.gather(*(client.post(PATH, body) for _ in range(12)))

    found = engine_served(test, max_num_seqs=1, max_waiting=2, on_full="reject")
    statuses = [status for status, _ in found]
    assert set(statuses) == {200, 503}
    refused = next(body for status, body in found if status == 503)
    assert "queue full" in refused["error"]["message"]


def test_a_dead_engine_is_unhealthy(engine_served):
    async def test(client):
        before = await client.get("/health")

        def fail():
            raise MemoryError("gone")

        client.llm.engine.step = fail
        answer = await client.post(PATH, GREEDY | {"prompt": "a"})
        return before, answer, await client.get("/health"), await client.post(PATH, {"prompt": "a"})

    before, (status, body), (health, _), (later, _) = engine_served(test)
    assert before == (200, None)
    assert (status, health, later) == (503, 503, 503)
    assert "gone" in body["error"]["message"]
