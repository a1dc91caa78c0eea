"""Finds the calls of tools in the text of an output, as a whole or delta by delta.

The form is that of Hermes models, for which vLLM has the parser `hermes`:

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    </tool_call>
"""

from __future__ import annotations

import re
from typing import Any
from uuid import uuid4

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_HEAD_CHARS = 1000
MAX_TAIL_CHARS = 100
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"arguments"\s*:\s*(?=\S)')
_TAIL = re.compile(r"\}?\s*(?:<[/a-z_]*)?$")
"""Text that may end the arguments of a call without being part of them."""


class ToolCallParser:
    """Parses one output. num_calls: calls that have begun."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._read = self._text
        self._pending = ""
        self._content = ""  # of the present delta
        self._calls: list[dict[str, Any]] = []

    def add(self, text: str, *, ends: bool) -> dict[str, Any]:
        """Returns the parts of a delta: `content`, or `tool_calls`, or none of them. ends: it is the last."""
        self._pending += text
        self._content, self._calls = "", []
        while self._read(ends):
            pass
        if self.num_calls and not self._content.strip():
            self._content = ""  # line breaks between calls and behind them
        parts: dict[str, Any] = {"content": self._content} if self._content else {}
        return parts | ({"tool_calls": self._calls} if self._calls else {})

    def _text(self, ends: bool) -> bool:
        """Reads up to a call; returns whether there is one."""
        before, opened, after = self._pending.partition(OPEN)
        kept = 0 if opened or ends else _overlap(before, OPEN)
        self._content += before[: len(before) - kept]
        self._pending = after if opened else before[len(before) - kept :]
        if opened:
            self._read = self._head
        return bool(opened)

    def _head(self, ends: bool) -> bool:
        """Reads the name of a call; returns whether more can be read."""
        head = _HEAD.match(self._pending)
        if head is not None:
            self.num_calls += 1
            call = {"index": self.num_calls - 1, "id": f"chatcmpl-tool-{uuid4().hex}", "type": "function"}
            self._calls.append(call | {"function": {"name": head[1], "arguments": ""}})
            self._pending = self._pending[head.end() :]
            self._read = self._arguments
            return True
        is_none = ends or len(self._pending) > MAX_HEAD_CHARS or CLOSE in self._pending
        if is_none:
            self._content += OPEN
            self._read = self._text
        return is_none

    def _arguments(self, ends: bool) -> bool:
        """Reads the arguments of a call; returns whether its end was read.

        What may be the tag of the end is no argument, also at the limit of the output, which may cut it.
        """
        before, closed, after = self._pending.partition(CLOSE)
        if closed:
            part, self._pending = before.rstrip().removesuffix("}"), after
            self._read = self._text
        else:
            found = _TAIL.search(before, max(0, len(before) - MAX_TAIL_CHARS))
            end = len(before) if found is None else found.start()
            part, self._pending = before[:end], before[end:]
        index = self.num_calls - 1
        if part and self._calls and self._calls[-1]["index"] == index:
            self._calls[-1]["function"]["arguments"] += part  # a delta has each call once
        elif part:
            self._calls.append({"index": index, "function": {"arguments": part}})
        return bool(closed)

    def message(self, text: str) -> dict[str, Any]:
        """Returns the parts of a message with this text: its content, and its calls."""
        parts = self.add(text, ends=True)
        found: list[dict[str, Any]] = []
        for call in parts.get("tool_calls", ()):
            if "id" in call:
                found.append({key: value for key, value in call.items() if key != "index"})
            else:
                found[-1]["function"]["arguments"] += call["function"]["arguments"]
        content = parts.get("content", "")
        return {"content": content or None, "tool_calls": found} if found else {"content": content}


def _overlap(text: str, word: str) -> int:
    """Returns the number of characters at the end of a text with which the word may begin."""
    return next((n for n in range(min(len(word) - 1, len(text)), 0, -1) if text.endswith(word[:n])), 0)
