"""A server on a socket of its own, to which tests send bytes; its loop runs during exchanges only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from experiments.serve.server import listen
from tests.worlds.serving import make_app, make_job

GOOD = {"prompt": "hello there", "max_tokens": 5, "seed": 7}
LIMIT_S = 60.0
"""Seconds after which an exchange hangs, on a busy machine, too."""


class SocketServer:
    """A server over a simulated fleet. runner: of the loop."""

    def __init__(self, runner: asyncio.Runner, *overrides: str) -> None:
        self.runner = runner
        runner.run(self._start(overrides))
        self._good = self.good_texts()

    async def _start(self, overrides: tuple[str, ...]) -> None:
        job = make_job(*overrides)
        self.fleet = job.fleet()
        self.fleet.driver.start()
        self._site, url = await listen(make_app(job, self.fleet), "127.0.0.1", 0)
        self.port = int(url.rsplit(":", 1)[1])

    def close(self) -> None:
        async def stop() -> None:
            await self._site.cleanup()
            self.fleet.driver.stop()

        self.runner.run(stop())

    def request(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Returns the status and the body of the response; 0 if the connection is cut before."""
        lines = {"Host": "localhost", "Connection": "close", "Content-Type": "application/json"} | dict(
            headers or {}
        )
        lines["Content-Length"] = str(len(body))
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        answer = self.exchange(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
        while answer.startswith(b"HTTP/1.1 100"):
            answer = answer.partition(b"\r\n\r\n")[2]
        return parsed(answer)

    def exchange(self, content: bytes, *, ends: bool = False) -> bytes:
        """Returns all bytes of the response to some bytes. ends: whether the client then ends its side."""

        async def run() -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            received = b""
            try:
                writer.write(content)
                if ends:
                    writer.write_eof()
                while part := await reader.read(1 << 16):
                    received += part
            except ConnectionError:
                pass  # what has come before counts
            finally:
                writer.close()
            return received

        return self.runner.run(asyncio.wait_for(run(), LIMIT_S))

    def good_texts(self) -> list[str]:
        """Returns the texts of a good request."""
        status, body = self.request("POST", "/v1/completions", json.dumps(GOOD).encode())
        assert status == 200, body
        return [choice["text"] for choice in json.loads(body)["choices"]]

    def check_good(self) -> None:
        """Asserts that the server serves a good request as at first."""
        assert self.good_texts() == self._good


@contextmanager
def socket_server(*overrides: str) -> Iterator[SocketServer]:
    """Yields a server."""
    with asyncio.Runner() as runner:
        server = SocketServer(runner, *overrides)
        yield server
        server.close()


def parsed(answer: bytes) -> tuple[int, bytes]:
    """Returns the status and the body of a response; 0 if there is none."""
    if not answer:
        return 0, b""
    head, _, rest = answer.partition(b"\r\n\r\n")
    is_chunked = b"transfer-encoding: chunked" in head.lower()
    return int(head.split(b" ", 2)[1]), _unchunked(rest) if is_chunked else rest


def _unchunked(rest: bytes) -> bytes:
    content = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        content, rest = content + rest[:length], rest[length + 2 :]
    return content


def error_of(body: bytes) -> dict[str, Any]:
    """Returns the error object of a response."""
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) < 1000
    return error
