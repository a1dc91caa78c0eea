"""A tokenizer without a vocabulary, for models whose tokenizer is not at hand.

A token is a space and up to five lower-case letters, up to four other ASCII characters of one kind, or one
other character (two tokens if UTF-8 needs four bytes for it). The id of a token is its text as a number, so
equal texts have equal ids, every id is decoded without a table, and a text that is continued keeps the tokens
of its words. English has some 3 characters per token, and 4.4 with Llama 3's tokenizer: where the number of
tokens of a text matters, choose the model's own tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_PIECES = re.compile(
    r"( ?[a-z]{1,5})"
    r"|(</?tool_call>)"
    r"|( ?[A-Z][a-z]{0,2}| ?[0-9]{1,3}|\s{1,4}(?!\S)|[!-/:-@\[-`{-~]{1,4}|[\x00-\x7f])"
    r"|[^\x00-\x7f]",
    re.ASCII,
)
"""Matches one piece: group 1 lower case, 2 a special token, 3 other ASCII characters."""
SPECIAL = {"<tool_call>": 2, "</tool_call>": 3}
"""Texts of one token, as they are of models that call tools; no other text has these ids."""
_SPECIAL_BYTES = {token: text.encode() for text, token in SPECIAL.items()}
_LETTERS = b" abcdefghijklmnopqrstuvwxyz"
_FIRST_WORD = 1 << 29
"""Ids from here on are lower-case words, in bijective numeration with 27 digits; smaller ids are ASCII."""
_FIRST_OTHER = 1 << 30
"""Ids from here on are the bytes of one other character, or of half of it."""


class ApproximateTokenizer:
    """Splits text into pieces of up to six characters, and the tags of calls of tools."""

    vocab_size = 1 << 31
    max_token_bytes: int | None = 12

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text; there are no special tokens to add."""
        ids: list[int] = []
        for match in _PIECES.finditer(text):
            content = match[0].encode("utf-8", "replace")
            if match[1] is not None:
                ids.append(_FIRST_WORD + _number(map(_LETTERS.index, content)))
            elif match[2] is not None:
                ids.append(SPECIAL[match[2]])
            elif match[3] is not None:
                ids.append(_ascii(content))
            elif len(content) == 4:
                ids += [_other(content[:2]), _other(content[2:])]
            else:
                ids.append(_other(content))
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids; an id that `encode` never returns has the text U+FFFD."""
        return b"".join(map(bytes_of, token_ids)).decode("utf-8", "replace")

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns a conversation as text: the tools, and each message after a line with its role."""
        turns = [f"<|tools|>\n{json.dumps(list(tools))}\n"] if tools else []
        for message in messages:
            calls = [call_text(call["function"]) for call in message.get("tool_calls", ())]
            turns.append(f"<|{message['role']}|>\n{message['content']}{''.join(calls)}\n")
        return "".join([*turns, "<|assistant|>\n"])


def call_text(function: Mapping[str, Any]) -> str:
    """Returns a call of a tool as an output has it: in the form of Hermes models, as vLLM parses it."""
    arguments = function["arguments"]
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}\n</tool_call>'


def bytes_of(token_id: int) -> bytes:
    """Returns the bytes for which a token id stands."""
    if token_id in _SPECIAL_BYTES:
        return _SPECIAL_BYTES[token_id]
    if token_id >= _FIRST_OTHER:
        number = token_id - _FIRST_OTHER
        length = (number.bit_length() - 1) // 8
        if 1 <= length <= 3 and number.bit_length() == 8 * length + 1:
            return (number ^ 1 << 8 * length).to_bytes(length)
    elif token_id > _FIRST_WORD:
        return _letters(token_id - _FIRST_WORD)
    elif token_id > 1 and (token_id.bit_length() - 1) % 7 == 0:
        length = token_id.bit_length() // 7
        return bytes(token_id >> 7 * place & 127 for place in range(length - 1, -1, -1))
    return "\ufffd".encode()


def _ascii(content: bytes) -> int:
    number = 1
    for byte in content:
        number = number << 7 | byte
    return number


def _other(content: bytes) -> int:
    return _FIRST_OTHER + (1 << 8 * len(content) | int.from_bytes(content))


def _number(digits: Iterable[int]) -> int:
    number = 0
    for digit in digits:
        number = number * 27 + digit + 1
    return number


def _letters(number: int) -> bytes:
    content = bytearray()
    while number:
        number, digit = divmod(number - 1, 27)
        content.append(_LETTERS[digit])
    return bytes(reversed(content))
