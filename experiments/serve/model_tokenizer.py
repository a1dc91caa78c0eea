"""The tokenizer of a model as the server needs it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from realengine.serving.tokenizer import Tokenizer


class ModelTokenizer:
    """A tokenizer of a file; the bytes of its longest token are not known."""

    max_token_bytes: int | None = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size

    @classmethod
    def from_path(cls, path: Path) -> ModelTokenizer:
        """Reads a tokenizer.json, its folder, or a GGUF file. Raises ValueError."""
        return cls(Tokenizer.from_path(path))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the text of a conversation, up to the start of the assistant's next turn."""
        return self._tokenizer.chat_prompt(list(map(_parsed, messages)), tools=tools, settings=settings)


def _parsed(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message whose calls of tools have arguments as values, as chat templates take them."""
    if "tool_calls" not in message:
        return dict(message)
    calls = []
    for call in message["tool_calls"]:
        try:
            arguments = json.loads(call["function"]["arguments"])
        except ValueError:
            arguments = call["function"]["arguments"]
        calls.append(call | {"function": call["function"] | {"arguments": arguments}})
    return dict(message) | {"tool_calls": calls}
