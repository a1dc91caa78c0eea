"""Requests that ask for a form get it: calls of tools, JSON of a schema, choices, patterns; else 400."""

from __future__ import annotations

import json
import re
import time
from random import Random

import jsonschema
import pytest

pytest.importorskip("aiohttp", reason="needs the extra serve: pip install 'windtunnel[serve]'")

from experiments.serve.approximate_tokenizer import ApproximateTokenizer
from experiments.serve.backend import Structure
from experiments.serve.http.tool_calls import ToolCallParser
from experiments.serve.simulated.structured import structured_text

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ASK = {"messages": [{"role": "user", "content": "How is the weather?"}], "max_tokens": 100, "seed": 3}
SCHEMAS = {
    "object": WEATHER,
    "optional": {
        "type": "object",
        "properties": {"a": {"type": ["number", "null"]}, "b": {"enum": [1, "x"]}},
    },
    "tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "v": {"type": "number"},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["v", "next"],
            }
        },
        "$ref": "#/$defs/node",
    },
    "list": {"type": "array", "items": {"type": "string", "minLength": 3, "maxLength": 9}, "minItems": 2},
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": False},
    "numbers": {"type": "array", "items": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 20},
    "pattern": {"type": "object", "properties": {"p": {"type": "string", "pattern": "^[A-Z]{3}-\\d+$"}}},
    "formats": {"type": "array", "prefixItems": [{"type": "string", "format": f} for f in ("date", "email")]},
    "all": {
        "allOf": [
            WEATHER | {"additionalProperties": True},
            {"properties": {"x": {"const": 5}}, "required": ["x"]},
        ]
    },
    "bounded pattern": {"type": "string", "pattern": "^[a-z]+$", "minLength": 5, "maxLength": 8},
    "any object": {"type": "object"},
    "anything": True,
    "untyped": {"properties": {"a": {"minimum": 3}}, "required": ["a"]},
    "unique": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "minItems": 2},
}
TOKENIZER = ApproximateTokenizer()
WORDS = [f" {word}" for word in ["the", "and", "of", "to", "in", "is"]]


def text_of(kind, value, num_tokens, seed=1):
    def count(text):
        return len(TOKENIZER.encode(text))

    return structured_text(
        Structure(kind, value, "x"), Random(seed), num_tokens, 2 * num_tokens, WORDS, count
    )


@pytest.mark.parametrize("num_tokens", [1, 60, 900])
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_texts_of_a_schema_are_valid(schema, num_tokens):
    for seed in range(5):
        jsonschema.validate(json.loads(text_of("json", schema, num_tokens, seed)), schema)


@pytest.mark.parametrize("name", ["object", "list", "numbers", "any object", "anything", "pattern"])
def test_an_open_form_has_about_as_many_tokens_as_asked_for(name):
    for num_tokens in (100, 1000):
        found = len(TOKENIZER.encode(text_of("json", SCHEMAS[name], num_tokens)))
        assert 0.8 * num_tokens <= found <= 1.2 * num_tokens


@pytest.mark.parametrize(
    "pattern",
    [
        r"\d{3}-\d{4}",
        r"(yes|no)+",
        r"[^a-z]{2,}",
        r"a*?b",
        r"\w+@\w+\.com\n",
        r"^(?i:abc)$",
        r".*",
        r"[一-鿿]+",
    ],
)
def test_texts_of_a_pattern_match_it(pattern):
    for seed in range(5):
        assert re.fullmatch(pattern, text_of("regex", pattern, 40, seed))


HOPELESS = {
    "not": {"not": {}},
    "false": False,
    "endless": {"$ref": "#"},
    "dangling": {"$ref": "#/$defs/x"},
    "long": {"type": "string", "minLength": 10**12},
    "wide": {"type": "array", "minItems": 5000, "items": {"type": "array", "minItems": 5000}},
    "empty choice": {"anyOf": []},
    "type": {"type": "strnig"},
    "no number": {"type": "integer", "minimum": 1.2, "maximum": 1.5},
    "exclusive": {"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1},
    "not a number": {"minimum": "a", "type": "number"},
    "not unique": {"type": "array", "minItems": 2, "uniqueItems": True, "items": {"const": 1}},
}


@pytest.mark.parametrize("schema", HOPELESS.values(), ids=HOPELESS)
def test_a_form_of_which_nothing_is_drawn_is_refused_at_once(schema):
    began_s = time.process_time()
    with pytest.raises(ValueError, match=r"\w"):
        text_of("json", schema, 1000)
    assert time.process_time() - began_s < 2


@pytest.mark.parametrize(
    "pattern", [r"(?=a)b", r"(a)\1", "(((a{1000}){1000}){1000})", "(", "a{99999999999}", "(" * 5000]
)
def test_a_pattern_of_which_nothing_is_drawn_is_refused_at_once(pattern):
    began_s = time.process_time()
    with pytest.raises(ValueError, match=r"\w"):
        text_of("regex", pattern, 1000)
    assert time.process_time() - began_s < 2


def test_calls_are_found_however_the_text_is_cut():
    arguments = ['{"a": "}", "b": {"c": "<x>"}}', "{}"]
    text = "Well. " + "\n".join(
        f'<tool_call>\n{{"name": "f{n}", "arguments": {each}}}\n</tool_call>'
        for n, each in enumerate(arguments)
    )
    for size in range(1, 12):
        parser, content, calls = ToolCallParser(), "", {}
        for start in range(0, len(text), size):
            part = parser.add(text[start : start + size], ends=start + size >= len(text))
            content += part.get("content", "")
            for call in part.get("tool_calls", ()):
                calls[call["index"]] = calls.get(call["index"], "") + call["function"]["arguments"]
        assert content.rstrip() == "Well."
        assert list(calls.values()) == arguments
    whole = ToolCallParser().message(text)
    assert [call["function"]["arguments"] for call in whole["tool_calls"]] == arguments
    assert ToolCallParser().message("a < b <tool") == {"content": "a < b <tool"}


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("max_tokens", [35, 100])
def test_a_call_that_is_asked_for_is_made(served, choice, max_tokens):
    body = ASK | {"tools": TOOLS[:1], "tool_choice": choice, "max_tokens": max_tokens}

    async def test(client):
        whole = await client.post(CHAT, body)
        return whole, await client.stream(CHAT, body | {"stream_options": {"include_usage": True}})

    (status, whole), events = served(test, output_length="max_tokens")
    assert status == 200, whole
    (called,) = whole["choices"]
    reason = "tool_calls" if choice == "required" else "stop"
    assert called["finish_reason"] == reason
    (call,) = called["message"]["tool_calls"]
    assert (call["type"], call["function"]["name"], called["message"]["content"]) == (
        "function",
        "get_weather",
        None,
    )
    jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER)
    *chunks, last = events
    deltas = [each for chunk in chunks for each in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert [each["function"].get("name") for each in deltas] == ["get_weather"] + [None] * (len(deltas) - 1)
    assert "id" in deltas[0]
    assert "".join(each["function"]["arguments"] for each in deltas) == call["function"]["arguments"]
    assert chunks[-1]["choices"][0]["finish_reason"] == reason
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] <= max_tokens


def test_a_choice_of_the_model_is_drawn_and_none_never_calls(served):
    async def test(client):
        async def made(body):
            answers = [(await client.post(CHAT, ASK | body | {"seed": seed}))[1] for seed in range(12)]
            return ["tool_calls" in each["choices"][0]["message"] for each in answers]

        return [await made({"tools": TOOLS} | more) for more in ({}, {"tool_choice": "none"})]

    auto, none = served(test)
    assert 0 < sum(auto) < len(auto)
    assert not any(none)
    assert all(served(test, tool_call_share=1.0)[0])


def test_the_next_turn_finds_the_call_in_the_cache(served):
    async def test(client):
        messages = [{"role": "user", "content": "word " * 100}]
        body = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 200}
        first = (await client.post(CHAT, body | {"messages": messages}))[1]
        message = first["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}
        again = (await client.post(CHAT, body | {"messages": [*messages, message, result]}))[1]
        return first["usage"], again["usage"]

    first, again = served(test, "caching=prefix")
    cached = again["prompt_tokens_details"]["cached_tokens"]
    assert first["total_tokens"] - 16 < cached <= first["total_tokens"]


FORMS = {
    "json_object": {"response_format": {"type": "json_object"}},
    "json_schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}}
    },
    "guided_json": {"guided_json": WEATHER},
    "guided_json as text": {"guided_json": json.dumps(WEATHER)},
    "structured json": {"structured_outputs": {"json": WEATHER}},
    "structured object": {"structured_outputs": {"json_object": True}},
    "guided_regex": {"guided_regex": r"\d{3}-\d{4}"},
    "structured regex": {"structured_outputs": {"regex": r"\d{3}-\d{4}"}},
    "guided_choice": {"guided_choice": ["red", "blue"]},
    "structured choice": {"structured_outputs": {"choice": ["red", "blue"]}},
}


@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_every_form_is_that_of_the_text(served, path):
    ask = ASK if path == CHAT else {"prompt": "x", "max_tokens": 100}

    async def test(client):
        return {name: await client.post(path, ask | form) for name, form in FORMS.items()}

    for name, (status, body) in served(test).items():
        assert status == 200, (name, body)
        choice = body["choices"][0]
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert choice["finish_reason"] == "stop"
        if "regex" in name:
            assert re.fullmatch(r"\d{3}-\d{4}", text)
        elif "choice" in name:
            assert text in ("red", "blue")
        else:
            schema = {"type": "object"} if "object" in name else WEATHER
            jsonschema.validate(json.loads(text), schema)


def test_limits_hold_for_forms_too(served):
    form = {"guided_json": WEATHER, "prompt": "x"}

    async def test(client):
        return [
            (await client.post(PLAIN, form | limits))[1]
            for limits in ({"max_tokens": 3}, {"max_tokens": 90, "ignore_eos": True}, {"max_tokens": 900})
        ]

    workload = ("workload=poisson", "workload.lengths.output_tokens.value=200")
    cut, full, free = served(test, *workload)
    assert (cut["choices"][0]["finish_reason"], cut["usage"]["completion_tokens"]) == ("length", 3)
    assert (full["choices"][0]["finish_reason"], full["usage"]["completion_tokens"]) == ("length", 90)
    assert free["choices"][0]["finish_reason"] == "stop"
    assert 160 <= free["usage"]["completion_tokens"] <= 240


REFUSED = {
    "logit_bias": {"logit_bias": {"5": 10}},
    "best_of": {"best_of": 3},
    "suffix": {"suffix": "end"},
    "bad_words": {"bad_words": ["no"]},
    "allowed_token_ids": {"allowed_token_ids": [1]},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 5},
    "include_stop_str_in_output": {"include_stop_str_in_output": True},
    "guided_grammar": {"guided_grammar": 'root ::= "a"'},
    "structured_outputs": {"structured_outputs": {"grammar": 'root ::= "a"'}},
    "response_format": {"response_format": {"type": "grammar"}},
    "guided_json": {"guided_json": {"not": {}}},
    "guided_regex": {"guided_regex": "(?=a)"},
    "guided_choice": {"guided_choice": []},
    "prompt_logprobs": {"prompt_logprobs": 1, "stream": True},
    "tool_choice": {"tool_choice": "required"},
    "tools": {"tools": [{"type": "function", "function": {"name": "a b"}}]},
    "max_tokens": {"max_tokens": 0},
    "guided_choice twice": {"guided_choice": ["a"], "response_format": {"type": "json_object"}},
}


def test_what_is_not_supported_names_its_field(served):
    async def test(client):
        return {name: await client.post(CHAT, ASK | body) for name, body in REFUSED.items()}

    for name, (status, body) in served(test).items():
        assert status == 400, (name, body)
        assert body["error"]["param"].startswith(name.split()[0]), (name, body)


def test_null_is_as_absent(served):
    names = (
        "echo stream n stop tools tool_choice response_format logit_bias best_of stream_options logprobs "
        "min_tokens"
    )

    async def test(client):
        return await client.post(CHAT, ASK | dict.fromkeys(names.split())), await client.post(CHAT, ASK)

    (status, nulls), (_, absent) = served(test, output_length="max_tokens")
    assert status == 200, nulls
    assert nulls["choices"] == absent["choices"]


def test_a_completion_may_echo_its_prompt_only(served):
    body = {"prompt": "Once upon a time", "max_tokens": 0, "echo": True, "logprobs": 1}

    async def test(client):
        return (await client.post(PLAIN, body)), await client.stream(PLAIN, body)

    (status, whole), events = served(test)
    assert status == 200, whole
    (choice,) = whole["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Once upon a time", "length")
    assert len(choice["logprobs"]["tokens"]) == whole["usage"]["prompt_tokens"]
    assert whole["usage"]["completion_tokens"] == 0
    assert "".join(event["choices"][0]["text"] for event in events) == "Once upon a time"


def test_prompt_logprobs_are_in_vllms_form(served):
    async def test(client):
        plain = await client.post(PLAIN, {"prompt": [[5, 6, 7], [8]], "max_tokens": 1, "prompt_logprobs": 2})
        return plain, await client.post(CHAT, ASK | {"prompt_logprobs": 0})

    (status, plain), (chat_status, chat) = served(test)
    assert (status, chat_status) == (200, 200)
    first, second = (choice["prompt_logprobs"] for choice in plain["choices"])
    assert first[0] is None
    assert [list(each) for each in first[1:]] == [["6", "0"], ["7", "0"]]
    assert set(first[1]["6"]) == {"logprob", "rank", "decoded_token"}
    assert second == [None]
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
