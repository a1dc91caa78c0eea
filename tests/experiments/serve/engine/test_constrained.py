"""Outputs of the real engine have the form that a request asks for, in each API, whole and streamed."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("llguidance", reason="forms need the package llguidance")
pytest.importorskip("aiohttp")
pytest.importorskip("jsonschema")

import jsonschema

from realengine.serving.tokenizer import CHATML, byte_tokenizer
from tests.experiments.serve.engine.conftest import tiny_model

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 4}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
OTHER = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "plan", "schema": SCHEMA, "strict": True}}
TOOLS = [
    {"type": "function", "function": {"name": "plan_trip", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "count-up", "parameters": OTHER}},
]
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def model():
    """Returns a tiny model whose chat template has a place for tools."""
    plain = tiny_model(max_position_embeddings=512)
    tokenizer = byte_tokenizer(plain.architecture.vocab_size, plain.architecture.eos_token_ids)
    tokenizer.chat_template = "{{ tools | length if tools }}" + CHATML.replace("SYSTEM", "S")
    return replace(plain, tokenizer=tokenizer)


async def messages_of(client, path, body):
    """Returns the (message, finish reason) of each output, with the deltas of a stream put together."""
    if not body["stream"]:
        status, answer = await client.post(path, body)
        assert status == 200, answer
        choices = answer["choices"]
        return [(each.get("message") or {"content": each["text"]}, each["finish_reason"]) for each in choices]
    found = {}
    for event in await client.stream(path, body):
        for choice in event["choices"]:
            message, _ = found.get(choice["index"], ({"content": "", "tool_calls": []}, None))
            delta = choice.get("delta") or {"content": choice.get("text")}
            message["content"] += delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    message["tool_calls"].append(call)
                else:
                    message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"][
                        "arguments"
                    ]
            found[choice["index"]] = message, choice["finish_reason"]
    return [found[index] for index in sorted(found)]


def is_plan(text):
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


ASKED = {
    "response_format": ({"response_format": FORMAT}, is_plan),
    "guided_json": ({"guided_json": SCHEMA}, is_plan),
    "guided_json as text": ({"guided_json": json.dumps(SCHEMA)}, is_plan),
    "structured json": ({"structured_outputs": {"json": SCHEMA}}, is_plan),
    "guided_regex": ({"guided_regex": r"\d{3}-\w{2,4}"}, re.compile(r"\d{3}-\w{2,4}").fullmatch),
    "structured regex": ({"structured_outputs": {"regex": "[xy]{5}"}}, re.compile("[xy]{5}").fullmatch),
    "guided_choice": ({"guided_choice": ["Oslo", "Rome"]}, lambda text: text in ("Oslo", "Rome")),
    "structured choice": ({"structured_outputs": {"choice": ["é", "è"]}}, lambda text: text in "éè"),
    "guided_grammar": ({"guided_grammar": 'root ::= "a" [bc] "d"'}, lambda text: text in ("abd", "acd")),
    "structured grammar": ({"structured_outputs": {"grammar": 'start: "a" | "b"'}}, re.compile("a|b").match),
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_outputs_have_the_form_that_is_asked_for(engine_served, model, stream):
    async def test(client):
        found = {}
        for name, (fields, _) in ASKED.items():
            body = {"max_tokens": 100, "seed": 1, "n": 2, "stream": stream, **fields}
            for path, more in ((COMPLETIONS, {"prompt": "Hi"}), (CHAT, {"messages": MESSAGES})):
                found[name, path] = await messages_of(client, path, body | more)
        return found

    for (name, path), outputs in engine_served(test, model=model).items():
        assert len(outputs) == 2
        for message, reason in outputs:
            text = message["content"]
            assert reason == "stop", (name, path, text)
            assert ASKED[name][1](text), (name, path, text)


def test_any_object_and_a_cut_one(engine_served, model):
    async def test(client):
        body = {"messages": MESSAGES, "response_format": {"type": "json_object"}, "seed": 3}
        return [await client.post(CHAT, body | {"max_tokens": limit}) for limit in (400, 1)]

    (_, whole), (_, cut) = engine_served(test, model=model)
    (whole,), (cut,) = whole["choices"], cut["choices"]
    assert (cut["finish_reason"], cut["message"]["content"]) == ("length", "{")
    assert whole["message"]["content"].startswith("{")
    if whole["finish_reason"] == "stop":
        assert isinstance(json.loads(whole["message"]["content"]), dict)


CHOICES = {
    "required": ("required", {"plan_trip", "count-up"}, "tool_calls"),
    "named": ({"type": "function", "function": {"name": "count-up"}}, {"count-up"}, "stop"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", CHOICES)
def test_tools_are_called(engine_served, model, choice, stream):
    asked, names, reason = CHOICES[choice]

    async def test(client):
        body = {
            "messages": MESSAGES,
            "tools": TOOLS,
            "tool_choice": asked,
            "max_tokens": 200,
            "stream": stream,
        }
        return [(await messages_of(client, CHAT, body | {"seed": seed}))[0] for seed in range(6)]

    called = set()
    for message, found in engine_served(test, model=model):
        assert found == reason
        (call,) = message["tool_calls"]
        called.add(call["function"]["name"])
        schema = SCHEMA if call["function"]["name"] == "plan_trip" else OTHER
        jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
        assert not message.get("content")
    assert called == names


def test_tools_that_may_be_called_leave_the_output_free(engine_served, model):
    async def test(client):
        body = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        return [await client.post(CHAT, body | {"tool_choice": choice}) for choice in ("auto", "none", None)]

    answers = [body["choices"][0] for _, body in engine_served(test, model=model)]
    assert [answer["finish_reason"] for answer in answers] == ["length"] * 3
    assert answers[0]["message"]["content"]


def test_other_apis_have_forms_too(engine_served, model):
    async def test(client):
        text = {"format": {"type": "json_schema", "name": "plan", "schema": SCHEMA}}
        tools = [{"name": "count-up", "input_schema": OTHER}]
        regex = {"max_new_tokens": 20, "regex": "[ab]{3}"}
        return [
            await client.post("/v1/responses", {"input": "Hi", "text": text, "max_output_tokens": 100}),
            await client.post(
                "/v1/messages",
                {"messages": MESSAGES, "max_tokens": 100, "tools": tools, "tool_choice": {"type": "any"}},
            ),
            await client.post("/generate", {"text": "Hi", "sampling_params": regex}),
        ]

    (_, response), (_, message), (_, generated) = engine_served(test, model=model)
    assert is_plan(response["output"][0]["content"][0]["text"])
    (used,) = [each for each in message["content"] if each["type"] == "tool_use"]
    assert message["stop_reason"] == "tool_use"
    jsonschema.validate(used["input"], OTHER)
    assert re.fullmatch("[ab]{3}", generated["text"])


def test_free_outputs_beside_them_keep_their_tokens(engine_served, model):
    free = {
        "prompt": "free",
        "max_tokens": 20,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }

    async def test(client):
        alone = await client.post(COMPLETIONS, free)
        forms = [{"prompt": "x", "max_tokens": 60, "guided_json": SCHEMA, "seed": seed} for seed in range(3)]
        together = await asyncio.gather(*(client.post(COMPLETIONS, body) for body in [free, *forms]))
        return [alone, *together]

    alone, beside, *forms = [body["choices"][0] for _, body in engine_served(test, model=model)]
    assert beside["token_ids"] == alone["token_ids"]
    assert all(is_plan(each["text"]) for each in forms)


DEEP = {"type": "object", "properties": {"a": {"not": {}}}}
BAD_TOOL = {"type": "function", "function": {"name": "odd", "parameters": DEEP}}
WRONG = {
    "schema": ({"guided_json": DEEP}, "guided_json", '#/properties/a: Unimplemented keys: ["not"]'),
    "format": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}},
        "response_format",
        "Invalid type: foo",
    ),
    "regex": ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
    "structured": ({"structured_outputs": {"regex": r"(a)\1"}}, "structured_outputs", "backreferences"),
    "grammar": ({"guided_grammar": "root ::= foo"}, "guided_grammar", "Rule 'foo' not found"),
    "long": ({"guided_choice": ["x" * 200_000]}, "guided_choice", "characters: at most 131072 are read"),
    "min_tokens": ({"guided_regex": "a", "min_tokens": 3}, "min_tokens", "must be 0 with guided_regex"),
    "beam": (
        {"guided_regex": "a", "use_beam_search": True, "n": 2},
        "guided_regex",
        "not with use_beam_search",
    ),
    "tool": (
        {"tools": [TOOLS[0], BAD_TOOL], "tool_choice": "required"},
        "tool_choice",
        'the parameters of the function odd: #/properties/a: Unimplemented keys: ["not"]',
    ),
    "tool in a beam": (
        {"tools": TOOLS, "tool_choice": "required", "use_beam_search": True, "n": 2},
        "tool_choice",
        "not with use_beam_search",
    ),
    "bias": ({"logit_bias": {"300": 1}}, None, "logit_bias: token 300 must be < 300"),
    "bias of text": ({"logit_bias": {"a": 1}}, "logit_bias.a.[key]", "integer"),
}


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_said_with_its_field(engine_served, model, stream):
    async def test(client):
        bodies = [{"messages": MESSAGES, "max_tokens": 9, **fields} for fields, _, _ in WRONG.values()]
        bodies = [body | {"stream": stream and "use_beam_search" not in body} for body in bodies]
        return [await client.post(CHAT, body) for body in bodies]

    for (name, (_, param, message)), (status, body) in zip(
        WRONG.items(), engine_served(test, model=model), strict=True
    ):
        assert status == 400, (name, body)
        assert message in body["error"]["message"], (name, body)
        assert body["error"]["param"] == param, name


def test_without_the_package_the_answer_says_how_to_get_it(engine_served, model, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)

    async def test(client):
        body = {"messages": MESSAGES, "max_tokens": 9}
        needed = [body | {"guided_regex": "a"}, body | {"tools": TOOLS, "tool_choice": "required"}]
        return [await client.post(CHAT, each) for each in [*needed, body | {"tools": TOOLS}]]

    *refused, (status, _) = engine_served(test, model=model)
    assert status == 200
    for (code, body), param in zip(refused, ("guided_regex", "tool_choice"), strict=True):
        assert (code, body["error"]["param"]) == (400, param)
        assert "pip install 'windtunnel[engine]'" in body["error"]["message"]


def test_other_requests_go_on_while_a_large_form_is_read(engine_served, model):
    many = {"type": "object", "properties": {f"k{number}": {"type": "string"} for number in range(2_500)}}

    async def test(client):
        began_s, longest_s = time.monotonic(), 0.0
        reading = asyncio.create_task(
            client.post(COMPLETIONS, {"prompt": "x", "max_tokens": 3, "guided_json": many})
        )
        while not reading.done():
            before_s = time.monotonic()
            await client.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1})
            longest_s = max(longest_s, time.monotonic() - before_s)
        return time.monotonic() - began_s, longest_s, await reading

    took_s, longest_s, (status, body) = engine_served(test, model=model)
    assert (status, body["error"]["param"]) == (400, "guided_json")
    assert "the output cannot go on in its form: Parser Error: Current row has" in body["error"]["message"]
    assert longest_s < 0.6 * took_s


def test_a_client_that_goes_away_frees_its_slot(engine_served, model):
    async def test(client):
        body = {"prompt": "x", "max_tokens": 400, "guided_regex": "a*", "stream": True}
        async with client.client.post(COMPLETIONS, json=body) as response:
            await response.content.readline()
        while client.fleet.num_in_progress:
            await asyncio.sleep(0.01)
        return client.llm.engine.runner.has_forms

    assert engine_served(test, model=model) is False


def test_biases_change_what_is_drawn(engine_served, model):
    async def test(client):
        body = {"prompt": "x", "max_tokens": 5, "temperature": 0, "return_token_ids": True}
        return [
            await client.post(COMPLETIONS, body | {"logit_bias": bias}) for bias in ({"42": 1000}, {}, None)
        ]

    (_, biased), *plain = engine_served(test, model=model)
    assert biased["choices"][0]["token_ids"] == [42] * 5
    assert len({tuple(body["choices"][0]["token_ids"]) for _, body in plain}) == 1
