"""A response of server-sent events: `data: {...}` lines, at the end `data: [DONE]`, also after an error."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from experiments.serve.errors import ApiError

HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


class EventStream:
    """The stream of one response. Its head is sent with the first event, so that errors before have a status.

    head: the fields that all events have.
    """

    def __init__(self, request: web.Request, head: dict[str, Any], headers: dict[str, str]) -> None:
        self._request = request
        self._head = json.dumps(head)[:-1].encode()
        self._headers = headers
        self._response: web.StreamResponse | None = None

    @property
    def has_begun(self) -> bool:
        """True if an event has been sent."""
        return self._response is not None

    async def send(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None) -> None:
        """Sends an event for each choice in one write, or one without a choice; waits for a slow client.

        usage: in each event; None: the events have none.
        """
        end = b"}\n\n" if usage is None else b', "usage": %b}\n\n' % json.dumps(usage).encode()
        listed = [json.dumps(choice).encode() for choice in choices] or [b""]
        events = [b'data: %b, "choices": [%b]%b' % (self._head, choice, end) for choice in listed]
        await self._write(b"".join(events))

    async def fail(self, error: ApiError) -> None:
        """Sends an error in mid-stream; the status of the response stays 200."""
        await self._write(f"data: {json.dumps(error.body())}\n\n".encode())

    async def end(self) -> web.StreamResponse:
        """Ends the stream."""
        await self._write(b"data: [DONE]\n\n")
        assert self._response is not None
        await self._response.write_eof()
        return self._response

    async def _write(self, content: bytes) -> None:
        if self._response is None:
            self._response = web.StreamResponse(headers=HEADERS | self._headers)
            await self._response.prepare(self._request)
        await self._response.write(content)
