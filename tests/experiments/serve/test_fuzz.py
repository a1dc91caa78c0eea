"""Random requests never make the server fail or hang, and it serves a good request after each of them.

Bodies are random changes of good ones for every route; `test_raw_http.py` changes the bytes of requests.
"""

from __future__ import annotations

import json
import logging
from typing import Any
from urllib.parse import quote

import pytest

pytest.importorskip("aiohttp", reason="needs the extra serve: pip install 'windtunnel[serve]'")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.worlds.socket_server import SocketServer, error_of, socket_server

SCENARIO = (
    "time_scale=1000",
    "engine.max_model_len=200",
    "replicas=2",
    "caching=prefix",
    "adapters=fixed_slots",
    "scheduling=priority",
    "serve.faults=true",
)

JSON_ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "prompt": "hello",
        "model": None,
        "max_tokens": 3,
        "min_tokens": 0,
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": 1,
        "stop": ["x"],
        "stop_token_ids": [1],
        "ignore_eos": False,
        "logprobs": 1,
        "echo": False,
        "stream": False,
        "stream_options": {"include_usage": True},
        "priority": 0,
        "user": "me",
        "cache_salt": "salt",
        "request_id": "mine",
        "return_token_ids": True,
        "logit_bias": {},
    },
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "hello"}],
        "max_completion_tokens": 3,
        "max_tokens": 3,
        "n": 1,
        "logprobs": True,
        "top_logprobs": 1,
        "echo": False,
        "stream": False,
        "stream_options": {"include_usage": True},
        "priority": 0,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": "required",
        "response_format": {"type": "text"},
        "guided_json": {"type": "object"},
        "chat_template_kwargs": {},
    },
    "/v1/responses": {
        "input": [{"type": "message", "role": "user", "content": "hello"}],
        "instructions": "be brief",
        "max_output_tokens": 3,
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        "stream": True,
        "reasoning": {},
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        "system": "be brief",
        "max_tokens": 3,
        "stop_sequences": ["x"],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "any"},
        "metadata": {"user_id": "me"},
        "stream": True,
    },
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hello"}], "tools": []},
    "/v1/embeddings": {"input": "hello", "dimensions": 8, "encoding_format": "base64", "user": "me"},
    "/generate": {
        "text": "hello",
        "sampling_params": {"max_new_tokens": 3, "regex": "[ab]+", "stop": ["x"], "n": 2},
        "stream": True,
        "rid": "mine",
        "return_logprob": True,
    },
    "/inference/v1/generate": {
        "token_ids": [1, 2],
        "sampling_params": {"max_tokens": 2, "logprobs": 1},
        "stream": True,
    },
    "/tokenize": {"prompt": "hello", "messages": None, "add_special_tokens": True, "model": None},
    "/detokenize": {"tokens": [1, 2, 3], "model": None},
    "/v1/load_lora_adapter": {
        "lora_name": "sql",
        "lora_path": "/etc/passwd",
        "load_inplace": True,
        "rank": 8,
    },
    "/v1/unload_lora_adapter": {"lora_name": "sql", "lora_int_id": 1},
    "/v1/batches": {
        "input_file_id": "file-1",
        "endpoint": "/v1/completions",
        "completion_window": "24h",
        "metadata": {"a": "b"},
    },
    "/v1/files": {"file": "x", "purpose": "batch"},
    "/reset_prefix_cache": {},
    "/nowhere": {"prompt": "x"},
}
"""Fields of a body of each route that takes one."""
GETS = (
    "/",
    "/v1/models",
    "/health",
    "/version",
    "/load",
    "/metrics",
    "/server_info",
    "/is_sleeping",
    "/v1/files",
    "/v1/batches",
    "/v1/files/file-1/content",
    "/v1/batches/batch_1",
)
CONTROLS = ("/sleep", "/wake_up", "/reset_prefix_cache", "/v1/batches/batch_1/cancel")
SPECIAL = st.sampled_from(
    [
        0,
        -1,
        1 << 31,
        1 << 63,
        -(1 << 63),
        1 << 64,
        10**40,
        10**4200,
        1e308,
        5e-324,
        -0.0,
        float("nan"),
        float("inf"),
        True,
        None,
        "",
        "\x00",
        "\ud800",
        "a\r\nSet-Cookie: x=1",
        "<script>alert(1)</script>",
        "{{ 7*7 }}{% for x in range(10) %}{% endfor %}",
        "../../etc/passwd",
        "x" * 5000,
        [],
        {},
        [[]],
        [None],
        [[1, 2], "x"],
        [1] * 500,
        ["x"] * 500,
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]},
        [{"type": "tool_use", "name": 5, "input": [1e999]}, {"type": "tool_result", "content": {}}],
        {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
        {"anyOf": [{"type": "array", "minItems": 10**9}, {"pattern": "(a{999}){999}"}, 5]},
    ]
)
VALUES = st.recursive(
    SPECIAL | st.integers() | st.floats() | st.text(max_size=20) | st.booleans(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@st.composite
def bodies(draw: st.DrawFn, fields: dict[str, Any]) -> bytes:
    """Draws a body in which some fields have random values, some are missing, and some are unknown."""
    names = list(fields)
    body = {name: fields[name] for name in names if draw(st.integers(0, 3))}
    for name in draw(st.lists(st.sampled_from(names) if names else st.text(max_size=9), max_size=4)):
        body[name] = draw(VALUES)
    kind = draw(st.integers(0, 11))
    text = _json(draw(VALUES) if kind == 0 else body)
    if kind == 1:
        at = draw(st.integers(0, len(text)))
        return text[:at] + draw(st.binary(max_size=4)) + text[at + draw(st.integers(0, 3)) :]
    if kind == 2:
        depth = draw(st.sampled_from([10, 190, 1000, 100_000]))
        return b'{"prompt": "x", "messages": ' + b"[" * depth + b"]" * depth + b"}"
    return text


def _json(value: Any) -> bytes:
    """Returns a value as JSON, with whole numbers of any length and lone surrogates as escapes."""
    if isinstance(value, bool) or not isinstance(value, int | list | dict):
        return json.dumps(value).encode()
    if isinstance(value, int):
        return str(value).encode() if abs(value) < 10**4200 else b"1" + b"0" * 5000
    if isinstance(value, list):
        return b"[" + b", ".join(map(_json, value)) + b"]"
    return b"{" + b", ".join(_json(str(name)) + b": " + _json(each) for name, each in value.items()) + b"}"


HEADERS = st.dictionaries(
    st.sampled_from(
        ["X-Request-Id", "X-Fault", "Content-Encoding", "Content-Type", "Accept", "Expect", "Upgrade"]
    ),
    st.sampled_from(
        [
            "gzip",
            "deflate",
            "br",
            "identity",
            "text/plain",
            "multipart/form-data",
            "multipart/form-data; boundary=x",
            "application/json; charset=utf-16",
            "application/json; charset=nope",
            "100-continue",
            "websocket",
            "status=503",
            "status=500, delay=0",
            "reset",
            "id",
            "\u00e9\u4e16",
            "x" * 3000,
        ]
    ),
    max_size=2,
)


@pytest.fixture(scope="module")
def server():
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    with socket_server(*SCENARIO) as made:
        yield made


def check(server: SocketServer, method: str, path: str, body: bytes, headers: dict[str, str]) -> None:
    """Asserts that a request is answered as it should be, and a good one after it."""
    status, answer = server.request(method, path, body, headers)
    asked = headers.get("X-Fault", "")
    if not status:
        assert asked == "reset"
    assert status != 500 or "500" in asked, answer
    if status >= 400 and path != "/v1/messages":  # whose errors have Anthropic's form
        assert error_of(answer)["code"] == status
    server.request("POST", "/wake_up")
    server.check_good()


CASES = st.sampled_from(list(JSON_ROUTES)).flatmap(
    lambda path: st.tuples(st.just(path), bodies(JSON_ROUTES[path]), HEADERS)
)


def check_body(server: SocketServer, case: tuple[str, bytes, dict[str, str]]) -> None:
    path, body, headers = case
    check(server, "POST", path, body, headers)


SETTINGS = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=40, derandomize=True, database=None, **SETTINGS)
@given(CASES)
def test_any_body_has_an_answer(server, case):
    check_body(server, case)


@pytest.mark.slow
@settings(max_examples=3000, **SETTINGS)
@given(CASES)
def test_many_bodies_have_an_answer(server, case):
    check_body(server, case)


QUERIES = st.text("?&=%/abclimteraodg0123456789\u00e9", max_size=30).map(quote)


@settings(max_examples=30, derandomize=True, database=None, **SETTINGS)
@given(
    st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "QUERY", "TRACE"]),
    st.sampled_from([*GETS, *JSON_ROUTES, *CONTROLS]),
    QUERIES,
)
def test_any_method_and_query_has_an_answer(server, method, path, query):
    status, answer = server.request(method, f"{path}?{query}")
    assert status != 500
    if status >= 400 and method != "HEAD":
        assert error_of(answer)["code"] == status
    server.request("POST", "/wake_up")
    server.check_good()
