"""Finds the calls of tools in the text of an output, as a whole or delta by delta.

The form is that of Hermes models, for which vLLM has the parser `hermes`:

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    </tool_call>
"""

from __future__ import annotations

import re
from typing import Any, Literal
from uuid import uuid4

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_HEAD_CHARS = 1000
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"arguments"\s*:\s*(?=\S)')
_TAIL = re.compile(r"\}?\s*(?:<[/a-z_]*)?$")
"""What may be the end of the arguments, and is not theirs."""


class ToolCallParser:
    """Parses one output. num_calls: calls that have begun."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._place: Literal["text", "head", "arguments"] = "text"
        self._pending = ""

    def add(self, text: str, *, ends: bool) -> dict[str, Any]:
        """Returns the parts of a delta: `content`, or `tool_calls`, or none of them. ends: it is the last."""
        self._pending += text
        content, calls = "", list[dict[str, Any]]()
        while True:
            if self._place == "text":
                before, opened, after = self._pending.partition(OPEN)
                kept = 0 if opened or ends else _overlap(before, OPEN)
                content += before[: len(before) - kept]
                self._pending = after if opened else before[len(before) - kept :]
                if not opened:
                    break
                self._place = "head"
            elif self._place == "head":
                head = _HEAD.match(self._pending)
                if head is None:
                    if ends or len(self._pending) > MAX_HEAD_CHARS or CLOSE in self._pending:
                        content, self._place = content + OPEN, "text"  # no call after all
                        continue
                    break
                calls.append(self._begun(head[1]))
                self._pending = self._pending[head.end() :]
                self._place = "arguments"
            else:
                before, closed, after = self._pending.partition(CLOSE)
                if closed:
                    part = before.rstrip().removesuffix("}")
                    self._place, self._pending = "text", after
                else:
                    found = _TAIL.search(before)  # also at the end: the limit of the output may cut the tag
                    end = len(before) if found is None else found.start()
                    part, self._pending = before[:end], before[end:]
                if part:
                    calls.append({"index": self.num_calls - 1, "function": {"arguments": part}})
                if not closed:
                    break
        if self.num_calls and not content.strip():
            content = ""  # line breaks between calls and behind them
        return ({"content": content} if content else {}) | ({"tool_calls": calls} if calls else {})

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

    def _begun(self, name: str) -> dict[str, Any]:
        self.num_calls += 1
        call = {"index": self.num_calls - 1, "id": f"chatcmpl-tool-{uuid4().hex}", "type": "function"}
        return call | {"function": {"name": name, "arguments": ""}}


def _overlap(text: str, word: str) -> int:
    """Returns the number of characters at the end of a text with which the word may begin."""
    return next((n for n in range(min(len(word) - 1, len(text)), 0, -1) if text.endswith(word[:n])), 0)
