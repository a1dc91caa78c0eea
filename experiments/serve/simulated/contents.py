"""Names the content of prompts and outputs, so that a simulated prefix cache finds what they share.

A prompt is named in blocks of 16 tokens by a digest of each block. An output has a single name, and a later
prompt that continues a finished request (the next turn of a chat) must repeat that name at the same tokens:

    turn 1   | prompt: blocks ...   | output: one name      |
    turn 2   | prompt: blocks ...   | output: the same name | new blocks ...

The index knows finished requests by the chained digest of their whole blocks and finds the longest one of
which a prompt is a continuation.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

from policies.core.request import Segment

BLOCK = 16
"""Tokens of a prompt that have one content id."""
MAX_FINISHED = 50_000
"""Finished requests that are known, the last ones."""


class Finished(NamedTuple):
    """A finished request: its tokens after the last whole block, and the segments of all its tokens."""

    num_tokens: int
    tail: bytes
    segments: tuple[Segment, ...]


class ContentIndex:
    """The contents of the requests of one model; salts and adapters have indexes of their own."""

    def __init__(self, salt: str = "") -> None:
        self._salt = salt.encode()
        self._finished: OrderedDict[bytes, list[Finished]] = OrderedDict()

    def segments(self, token_ids: Sequence[int]) -> tuple[Segment, ...]:
        """Returns the segments of a prompt."""
        content = _bytes_of(token_ids)
        known = self._longest(content, len(token_ids))
        if known is None:
            return tuple(self._blocks(content, 0))
        self._finished.move_to_end(known[0])
        return known[1].segments + tuple(self._blocks(content, known[1].num_tokens))

    def finish(
        self, prompt: Sequence[int], segments: tuple[Segment, ...], answer_id: int, output: Sequence[int]
    ) -> None:
        """Learns a finished request, whose output has the content id answer_id."""
        content = _bytes_of([*prompt, *output])
        num_tokens = len(prompt) + len(output)
        if not output or num_tokens < BLOCK:
            return
        *_, (num_whole, key) = self._chain(content)
        tail = content[4 * num_whole :]
        known = self._finished.setdefault(key, [])
        if all(each.tail != tail for each in known):
            known.append(Finished(num_tokens, tail, (*segments, Segment(answer_id, len(output)))))
        self._finished.move_to_end(key)
        if len(self._finished) > MAX_FINISHED:
            self._finished.popitem(last=False)

    def _longest(self, content: bytes, num_tokens: int) -> tuple[bytes, Finished] | None:
        """Returns the longest finished request that a prompt continues, with its key."""
        found = None
        for num_whole, key in self._chain(content):
            for each in self._finished.get(key, ()):
                start = 4 * num_whole
                if each.num_tokens <= num_tokens and content.startswith(each.tail, start):
                    found = (key, each)
        return found

    def _chain(self, content: bytes) -> Iterator[tuple[int, bytes]]:
        """Yields the number of tokens up to the end of each whole block, and the digest of these tokens."""
        size = 4 * BLOCK
        digest = blake2b(self._salt, digest_size=16)
        for end in range(size, len(content) + 1, size):
            digest.update(content[end - size : end])
            yield end // 4, digest.digest()

    def _blocks(self, content: bytes, start: int) -> Iterator[Segment]:
        """Yields the segments of the tokens from `start` on."""
        size = 4 * BLOCK
        for begin in range(4 * start, len(content), size):
            block = content[begin : begin + size]
            name = blake2b(block, digest_size=8, key=self._salt[:64]).digest()
            yield Segment(int.from_bytes(name) >> 1, len(block) // 4)


def _bytes_of(token_ids: Sequence[int]) -> bytes:
    return array("I", token_ids).tobytes()
