"""An OpenAI-compatible endpoint that streams at scripted times, for tests and for measuring the client.

    python -m experiments.observe.scripted_server --port 8000 --first-s 0.05 --gap-s 0.01

Outputs repeat the word "a". Requests are not validated; it is not meant for other uses.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

ANSWER_TOKENS = 16
"""Output tokens if the client sets no limit."""


class Piece(NamedTuple):
    """One chunk: its number of tokens and the seconds after the request's arrival at which it is sent."""

    after_s: float
    num_tokens: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """The times of a response's chunks, and its end.

    status: any status but 200 returns `error` and no stream. dies_after: number of chunks after which the
    connection is cut. usage: "each" chunk reports the tokens so far, as vLLM does with
    continuous_usage_stats, or only the "last" does, or "none".
    """

    first_s: float = 0.05
    gap_s: float = 0.01
    tokens_per_chunk: int = 1
    status: int = 200
    error: str = ""
    dies_after: int | None = None
    usage: str = "each"
    cached_tokens: int = 0

    def pieces(self, num_tokens: int) -> Iterator[Piece]:
        """Yields the chunks of a response of num_tokens tokens."""
        for i, start in enumerate(range(0, num_tokens, self.tokens_per_chunk)):
            yield Piece(self.first_s + i * self.gap_s, min(self.tokens_per_chunk, num_tokens - start))


@dataclass(kw_only=True, slots=True)
class Served:
    """One request as the server received it; times on time.perf_counter's clock."""

    path: str
    body: dict[str, Any]
    came_s: float
    sent_s: list[float] = field(default_factory=list)


class ScriptedServer:
    """Serves `script_of(body)` on 127.0.0.1 inside `async with`; keeps the received requests in `served`."""

    def __init__(
        self,
        script_of: Callable[[dict[str, Any]], Script] = lambda body: Script(),
        *,
        port: int = 0,
        models: tuple[str, ...] = ("scripted",),
        api_key: str | None = None,
        keeps_record: bool = True,
    ) -> None:
        self.served: list[Served] = []
        self.dead = False
        self._script_of = script_of
        self._port = port
        self._models = models
        self._api_key = api_key
        self._keeps_record = keeps_record
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()  # one per connection

    async def __aenter__(self) -> ScriptedServer:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self._port, backlog=4096)
        return self

    async def __aexit__(self, *unused: object) -> None:
        self.die()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def die(self) -> None:
        """Cuts all connections and accepts no more."""
        self.dead = True
        if self._server is not None:
            self._server.close()
        for writer in self._open:
            writer.transport.abort()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task of our own: if asyncio makes it, Python 3.11 logs an error where it is cancelled.
        task = asyncio.create_task(self._requests(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._one_request(reader, writer):
                pass
        self._open.discard(writer)
        writer.close()

    async def _one_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Handles one request; returns whether the connection stays open for another."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        request_line, *lines = head.split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        text = await reader.readexactly(int(headers.get("content-length", 0)))
        came_s, (method, path, _) = time.perf_counter(), request_line.split(" ")
        if self._api_key is not None and headers.get("authorization") != f"Bearer {self._api_key}":
            return _answer(writer, 401, {"error": {"message": "Unauthorized"}})
        if path == "/v1/models":
            models = [{"id": name, "max_model_len": 4096} for name in self._models]
            return _answer(writer, 200, {"object": "list", "data": models})
        if method != "POST" or path not in ("/v1/completions", "/v1/chat/completions"):
            return _answer(writer, 404, {"detail": "Not Found"})
        body: dict[str, Any] = json.loads(text)
        if body["model"] not in self._models:
            error = {"message": f"The model `{body['model']}` does not exist.", "type": "NotFoundError"}
            return _answer(writer, 404, {"error": error})
        served = Served(path=path, body=body, came_s=came_s)
        if self._keeps_record:
            self.served.append(served)
        script = self._script_of(body)
        if script.status != 200:
            return _answer(writer, script.status, {"error": {"message": script.error}})
        return await _stream(writer, script, served)


async def _stream(writer: asyncio.StreamWriter, script: Script, served: Served) -> bool:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    body, num_sent = served.body, 0
    num_tokens = int(body.get("max_tokens", ANSWER_TOKENS))
    num_prompt = _prompt_tokens(body)
    for i, piece in enumerate(script.pieces(num_tokens)):
        if script.dies_after == i:
            await writer.drain()
            writer.transport.abort()
            return False
        await asyncio.sleep(max(0.0, served.came_s + piece.after_s - time.perf_counter()))
        if writer.is_closing():
            return False
        num_sent += piece.num_tokens
        text = " a" * piece.num_tokens
        is_last = num_sent >= num_tokens
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if is_last else None}
        choice |= {"delta": {"content": text}} if "chat" in served.path else {"text": text}
        if body.get("return_token_ids"):
            choice["token_ids"] = [7] * piece.num_tokens
        event: dict[str, Any] = {"choices": [choice]}
        if script.usage == "each":
            event["usage"] = _usage(num_prompt, num_sent, script)
        served.sent_s.append(time.perf_counter())
        _send(writer, json.dumps(event))
    if script.usage != "none":
        _send(writer, json.dumps({"choices": [], "usage": _usage(num_prompt, num_sent, script)}))
    _send(writer, "[DONE]")
    writer.write(b"0\r\n\r\n")
    await writer.drain()
    return True


def _usage(num_prompt: int, num_sent: int, script: Script) -> dict[str, Any]:
    usage: dict[str, Any] = {"prompt_tokens": num_prompt, "completion_tokens": num_sent}
    if script.cached_tokens:
        usage["prompt_tokens_details"] = {"cached_tokens": script.cached_tokens}
    return usage


def _prompt_tokens(body: dict[str, Any]) -> int:
    """Returns a prompt's tokens; a text has two per word, and a chat ten more."""
    if "messages" in body:
        return 10 + sum(2 * len(message["content"].split()) for message in body["messages"])
    prompt = body["prompt"]
    return 2 * len(prompt.split()) if isinstance(prompt, str) else len(prompt)


def _send(writer: asyncio.StreamWriter, data: str) -> None:
    text = f"data: {data}\n\n"
    writer.write(f"{len(text):x}\r\n{text}\r\n".encode())


def _answer(writer: asyncio.StreamWriter, status: int, answer: dict[str, Any]) -> bool:
    text = json.dumps(answer)
    head = (
        f"HTTP/1.1 {status} Status\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    )
    writer.write((head + text).encode())
    return True


async def _serve(port: int, script: Script) -> None:
    forever: Awaitable[None] = asyncio.Event().wait()  # type: ignore[assignment]
    async with ScriptedServer(lambda body: script, port=port, keeps_record=False) as server:
        print(server.url, flush=True)
        await forever


def main() -> None:
    """Serves until stopped; prints the address."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--first-s", type=float, default=0.05)
    parser.add_argument("--gap-s", type=float, default=0.01)
    parser.add_argument("--tokens-per-chunk", type=int, default=1)
    given = parser.parse_args()
    script = Script(first_s=given.first_s, gap_s=given.gap_s, tokens_per_chunk=given.tokens_per_chunk)
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(given.port, script))


if __name__ == "__main__":
    main()
