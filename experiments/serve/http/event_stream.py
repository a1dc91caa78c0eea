"""A response of server-sent events: `data: {...}` lines, at the end `data: [DONE]`, also after an error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import HttpVersion11, web

from experiments.serve.errors import ApiError

_ENCODER = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"
HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


class EventStream:
    """The stream of one response. Its head is sent with the first event, so that errors before have a status.

    head: the fields that all events have.
    """

    def __init__(self, request: web.Request, head: dict[str, Any], headers: dict[str, str]) -> None:
        self._request = request
        self._fields = head
        self._head = encode_json(head)[:-1]
        self._headers = headers
        self._response: web.StreamResponse | None = None
        self._transport: asyncio.Transport | None = None

    @property
    def has_begun(self) -> bool:
        """True if an event has been sent."""
        return self._response is not None

    async def send(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None) -> None:
        """Sends an event for each choice in one write; waits for a slow client.

        usage: in each event; None: the events have none.
        """
        await self._write(self._events(choices, usage))

    @property
    def takes_at_once(self) -> bool:
        """True if the head is sent, the client is there, and it has read all that was sent before."""
        transport = self._transport
        return transport is not None and not (transport.is_closing() or transport.get_write_buffer_size())

    def send_at_once(self, choice: dict[str, Any], usage: dict[str, Any] | None) -> None:
        """Sends an event as `send` does, without a wait; `takes_at_once` must be true."""
        assert self._transport is not None
        content = self._events([choice], usage)
        self._transport.write(b"%x\r\n%b\r\n" % (len(content), content))

    async def fail(self, error: ApiError) -> web.StreamResponse:
        """Ends the stream with an error; the status of the response stays 200."""
        return await self._end(self._failure(error))

    async def end(self, usage: dict[str, Any] | None = None) -> web.StreamResponse:
        """Ends the stream, with an event that has the usage only if there is one, in one write."""
        return await self._end(self._last(usage))

    def _last(self, usage: dict[str, Any] | None) -> bytes:
        return (b"" if usage is None else self._events([], usage)) + DONE

    def _failure(self, error: ApiError) -> bytes:
        return f"data: {json.dumps(error.body())}\n\n".encode() + DONE

    async def _end(self, content: bytes) -> web.StreamResponse:
        response = await self._begun()
        await response.write_eof(content)
        return response

    def _events(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None) -> bytes:
        end = b"}\n\n" if usage is None else b',"usage":%b}\n\n' % encode_json(usage)
        listed = [encode_json(choice) for choice in choices] or [b""]
        return b"".join([b'data: %b,"choices":[%b]%b' % (self._head, choice, end) for choice in listed])

    async def _write(self, content: bytes) -> None:
        await (await self._begun()).write(content)

    async def _begun(self) -> web.StreamResponse:
        if self._response is None:
            self._response = web.StreamResponse(headers=HEADERS | self._headers)
            if self._request.version >= HttpVersion11:
                self._response.enable_chunked_encoding()  # before HTTP/1.1, the end of the connection ends it
                self._transport = self._request.transport
            await self._response.prepare(self._request)
        return self._response


def event(name: str, value: dict[str, Any]) -> bytes:
    """Returns an event with a name, which is its type, too."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode_json({"type": name} | value))


def encode_json(value: dict[str, Any]) -> bytes:
    """Returns an object as JSON; halves of surrogate pairs, which UTF-8 does not have, are escaped."""
    try:
        return _ENCODER.encode(value)
    except UnicodeEncodeError:
        return json.dumps(value).encode()
