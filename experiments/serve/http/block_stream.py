"""Streams of APIs whose answers are blocks, each of which begins and ends with an event: a text, or a call.

What they get is the deltas of a chat completion; a subclass writes the events of its API.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from experiments.serve.errors import ApiError
from experiments.serve.http.event_stream import EventStream


class BlockStream(EventStream):
    """A stream of one output. num_blocks: blocks that have begun. text: of the block that is open."""

    num_blocks = 0
    text = ""
    call: dict[str, Any] | None = None
    """The call of the block that is open, without its arguments; None: the block is a text."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    usage: dict[str, Any] | None = None

    @abstractmethod
    def begin(self) -> bytes:
        """Returns the events before the first block."""

    @abstractmethod
    def open_block(self) -> bytes:
        """Returns the events with which the present block begins."""

    @abstractmethod
    def add_text(self, text: str) -> bytes:
        """Returns the events of more text, or more arguments, of the present block."""

    @abstractmethod
    def close_block(self) -> bytes:
        """Returns the events with which the present block ends."""

    @abstractmethod
    def finish(self) -> bytes:
        """Returns the events after the last block."""

    @abstractmethod
    def error(self, error: ApiError) -> bytes:
        """Returns the events of an error in mid-stream."""

    def _events(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None) -> bytes:
        content = b""
        if self.usage is None:
            self.usage = usage
            content += self.begin()
        self.usage = usage
        for choice in choices:
            delta = choice["delta"]
            if text := delta.get("content"):
                content += self._opened(None) if self.call or not self._is_open else b""
                content += self._more(text)
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    content += self._opened(call)
                content += self._more(call["function"].get("arguments", ""))
            if choice["finish_reason"] is not None:
                self.finish_reason, self.stop_reason = choice["finish_reason"], choice.get("stop_reason")
        return content

    _is_open = False

    def _opened(self, call: dict[str, Any] | None) -> bytes:
        content = self._closed()
        self.call, self.text, self._is_open = call, "", True
        self.num_blocks += 1
        return content + self.open_block()

    def _more(self, text: str) -> bytes:
        self.text += text
        return self.add_text(text) if text else b""

    def _closed(self) -> bytes:
        content = self.close_block() if self._is_open else b""
        self._is_open, self.call = False, None
        return content

    def _last(self, usage: dict[str, Any] | None) -> bytes:
        content = self._events([], usage)
        if not self.num_blocks:
            content += self._opened(None)
        content += self._closed()
        return content + self.finish()

    def _failure(self, error: ApiError) -> bytes:
        return self.error(error)
