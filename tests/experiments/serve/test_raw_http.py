"""Clients that break HTTP, stay silent or vanish get an error or nothing, and others are served."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import socket
import time

import pytest

pytest.importorskip("aiohttp", reason="needs the extra serve: pip install 'windtunnel[serve]'")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.worlds.socket_server import GOOD, LIMIT_S, error_of, parsed, socket_server

BODY = json.dumps(GOOD).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CLOSE = b"Connection: close\r\n"


def whole(body: bytes = BODY, *lines: bytes) -> bytes:
    """Returns the bytes of a request."""
    more = b"".join(line + b"\r\n" for line in lines)
    return HEAD + CLOSE + more + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.fixture(scope="module")
def server():
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    with socket_server("time_scale=1000", "engine.max_model_len=2000", "serve.faults=true") as made:
        yield made


MALFORMED = {
    "nothing": b"",
    "line breaks only": b"\r\n\r\n\r\n",
    "half a line": b"POST /v1/compl",
    "half a header": HEAD + b"Content-Le",
    "half a body": HEAD + b"Content-Length: 100\r\n\r\n{",
    "NUL bytes": b"\0" * 1000,
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": bytes.fromhex("16030100f8010000f40303") + bytes(range(200)),
    "no version": b"POST /v1/completions\r\n\r\n",
    "a version of three digits": b"GET /health HTTP/999.1\r\n\r\n",
    "a space before the colon": b"GET /health HTTP/1.1\r\nHost : x\r\n\r\n",
    "a folded header": b"GET /health HTTP/1.1\r\nHost: localhost\r\n y\r\n\r\n",
    "a negative length": HEAD + b"Content-Length: -5\r\n\r\n{}",
    "a length of many digits": HEAD + b"Content-Length: " + b"9" * 400 + b"\r\n\r\n{}",
    "two lengths": HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "a length and chunks": HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "an unknown coding": HEAD + b"Transfer-Encoding: rot13\r\n\r\n{}",
    "a chunk without a size": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "a chunk that is too short": HEAD + b"Transfer-Encoding: chunked\r\n\r\n9\r\n{}\r\n0\r\n\r\n",
    "chunks without an end": HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n",
    "a chunk of 2^64 bytes": HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n{}\r\n",
    "a long path": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    "a long header": HEAD + b"X-Long: " + b"a" * 100_000 + b"\r\n\r\n",
    "many headers": HEAD + b"".join(b"X-%d: a\r\n" % i for i in range(100_000)) + b"\r\n",
    "an upgrade": b"GET /health HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    "a wrong authority": b"GET http://[::1/health HTTP/1.1\r\nHost: [::1\r\n\r\n",
    "a path of escapes": b"GET /%00%ff%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nConnection: close\r\n\r\n",
}


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED)
def test_what_is_no_request_is_an_error_of_the_client(server, content):
    answer = server.exchange(content, ends=True)
    status, body = parsed(answer) if answer.startswith(b"HTTP/") else (0, b"")
    assert not answer or 200 <= status < 500 or status == 505
    if status >= 400:
        assert error_of(body)["code"] == status
    server.check_good()


@pytest.mark.parametrize("case", ["TLS", "a space before the colon", "two lengths", "many headers"])
def test_bytes_that_are_no_request_get_an_error_object(server, case):
    """aiohttp answers these without the application, and closes the connection."""
    answer = server.exchange(MALFORMED[case])
    status, body = parsed(answer)
    assert (status, error_of(body)["type"]) == (400, "BadRequestError")
    assert error_of(body)["message"].startswith("This is no HTTP request: ")
    assert b"\r\nContent-Type: application/json" in answer


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "identity, gzip"])
@pytest.mark.parametrize(
    "body",
    [gzip.compress(BODY), gzip.compress(b" " * (1 << 24)), b"no gzip"],
    ids=["a body", "a bomb", "no gzip"],  # the bytes have a time in them, and workers must agree on ids
)
def test_a_compressed_body_is_not_unpacked_as_in_vllm(server, coding, body):
    status, answer = parsed(server.exchange(whole(body, b"Content-Encoding: " + coding.encode())))
    assert (status, error_of(answer)["code"]) == (400, 400)
    server.check_good()


def test_a_body_beyond_the_limit_is_refused(server):
    status, answer = parsed(server.exchange(whole(b" " * (65 << 20))))
    assert (status, error_of(answer)["code"]) == (413, 413)
    server.check_good()


@pytest.mark.parametrize(
    "path", [b"/v1/completions", b"/v1/chat/completions", b"/tokenize", b"/v1/files", b"/x"]
)
def test_the_head_of_a_body_beyond_the_limit_is_enough(server, path):
    """The client sends nothing more, and has its answer at once."""
    head = HEAD.replace(b"/v1/completions", path)
    begun = time.monotonic()
    status, answer = parsed(server.exchange(head + CLOSE + b"Content-Length: 1000000000000\r\n\r\n"))
    assert time.monotonic() - begun < 5
    assert (status, error_of(answer)["code"]) == (413, 413)
    assert "1,000,000,000,000 bytes by its Content-Length" in error_of(answer)["message"]
    server.check_good()


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/jsonx", ""])
def test_a_body_that_is_not_declared_as_json_is_refused(server, kind):
    status, answer = server.request("POST", "/v1/completions", BODY, {"Content-Type": kind})
    assert (status, error_of(answer)["code"]) == (400, 400)


def test_a_wrong_method_is_told_the_right_ones(server):
    answer = server.exchange(b"DELETE /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + CLOSE + b"\r\n")
    assert parsed(answer)[0] == 405
    assert b"\r\nAllow: POST\r\n" in answer


def test_a_header_cannot_bring_another_into_the_response(server):
    request_id = json.dumps({"prompt": "x", "max_tokens": 1, "request_id": "a\r\nX-Evil: 1\r\n\r\n<b>"})
    answer = server.exchange(whole(request_id.encode()))
    assert parsed(answer)[0] == 200
    assert b"\r\nX-Evil" not in answer
    answer = server.exchange(whole(BODY, b"X-Request-Id: a\xc2\x85b\xe2\x80\xa8\xff\xfe"))
    assert parsed(answer)[0] == 200
    assert json.loads(parsed(answer)[1])["id"] == "cmpl-ab"


def test_clients_that_wait_do_not_hold_up_the_others(server):
    """Clients send half of a request, nothing, or a byte at a time, while others are served."""

    async def hold() -> list[asyncio.StreamWriter]:
        writers = []
        for number in range(200):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(whole()[: number if number % 2 else 0])
            writers.append(writer)
        return writers

    async def drip() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for place, byte in enumerate(whole()):
            writer.write(bytes([byte]))
            if place % 8 == 0:
                await asyncio.sleep(0.001)
        answer = await reader.read()
        writer.close()
        return answer

    writers = server.runner.run(hold())
    server.check_good()
    assert parsed(server.runner.run(asyncio.wait_for(drip(), LIMIT_S)))[0] == 200
    server.check_good()
    for writer in writers:
        writer.close()


def test_a_client_that_never_reads_costs_a_bounded_amount_of_memory(server):
    """Its stream stands still once the buffers of its connection are full; it is dropped when it vanishes."""
    body = {"prompt": "x", "max_tokens": 1900, "n": 20, "logprobs": 9, "stream": True, "ignore_eos": True}
    request = whole(json.dumps(body).encode())

    async def begin() -> asyncio.StreamWriter:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        _, writer = await asyncio.open_connection(sock=client)
        writer.transport.pause_reading()
        writer.write(request)
        while server.fleet.simulation.num_in_progress or not server.fleet.num_in_progress:
            await asyncio.sleep(0.01)
        return writer

    writer = server.runner.run(asyncio.wait_for(begin(), LIMIT_S))
    assert server.fleet.num_in_progress > 0  # the simulation is done, the client has not taken its tokens
    server.check_good()

    async def vanish() -> None:
        writer.transport.abort()
        while server.fleet.num_in_progress:
            await asyncio.sleep(0.01)

    server.runner.run(asyncio.wait_for(vanish(), LIMIT_S))
    server.check_good()


PARTS = st.sampled_from(
    [
        b"\r\n",
        b"\n",
        b"\r",
        b"\0",
        b": ",
        b" ",
        b"HTTP/1.1",
        b"Content-Length: 0\r\n",
        b"Content-Length: 99999\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Expect: 100-continue\r\n",
        b"Upgrade: h2c\r\nConnection: upgrade\r\n",
        b"Content-Encoding: gzip\r\n",
        b"5\r\nhello\r\n",
        b"0\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xfe",
    ]
)


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    """Draws a request in which some bytes are replaced, left out, or repeated."""
    content = draw(
        st.sampled_from(
            [whole(), whole(b""), b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n" + CLOSE + b"\r\n"]
        )
    )
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        end = min(len(content), start + draw(st.integers(0, 20)))
        middle = draw(PARTS | st.binary(max_size=6) | st.just(content[start:end] * 2))
        content = content[:start] + middle + content[end:]
    return content


def check_bytes(server, content: bytes) -> None:
    answer = server.exchange(content, ends=True)
    if answer.startswith(b"HTTP/"):
        assert int(answer.split(b" ", 2)[1]) not in range(500, 505), answer
    server.check_good()


SETTINGS = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=60, derandomize=True, database=None, **SETTINGS)
@given(mutations())
def test_any_bytes_leave_the_server_well(server, content):
    check_bytes(server, content)


@pytest.mark.slow
@settings(max_examples=5000, **SETTINGS)
@given(mutations())
def test_many_bytes_leave_the_server_well(server, content):
    check_bytes(server, content)
