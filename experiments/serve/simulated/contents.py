"""Names the content of prompts and outputs, so that a simulated prefix cache finds what they share.

A prompt is named in blocks of 16 tokens by a hash of each block. An output has a single name, and a later
prompt that continues a finished request (the next turn of a chat) must repeat that name at the same tokens:

    turn 1   | prompt: blocks ...   | output: one name      |
    turn 2   | prompt: blocks ...   | output: the same name | new blocks ...

The index knows finished requests by the chained hash of their whole blocks and finds the longest one of which
a prompt is a continuation. Python's own hashes are used, as names are compared within one process only.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from policies.core.request import Segment

BLOCK = 16
"""Tokens of a prompt that have one content id."""
MAX_FINISHED = 50_000
"""Finished requests that are known, the last ones."""
_BYTES = 4 * BLOCK
_POSITIVE = (1 << 63) - 1


class Finished(NamedTuple):
    """A finished request: its tokens after the last whole block, and the segments of all its tokens."""

    num_tokens: int
    tail: bytes
    segments: tuple[Segment, ...]


class ContentIndex:
    """The contents of the requests of one model; salts and adapters have indexes of their own."""

    def __init__(self, salt: str = "") -> None:
        self._salt = hash(salt)
        self._finished: OrderedDict[int, list[Finished]] = OrderedDict()

    def segments(self, token_ids: Sequence[int]) -> tuple[Segment, ...]:
        """Returns the segments of a prompt."""
        content = _bytes_of(token_ids)
        known = self._longest(content, len(token_ids))
        if known is None:
            return self._blocks(content, 0)
        return known.segments + self._blocks(content, known.num_tokens)

    def finish(
        self, prompt: Sequence[int], segments: tuple[Segment, ...], answer_id: int, output: Sequence[int]
    ) -> None:
        """Learns a finished request, whose output has the content id answer_id."""
        num_tokens = len(prompt) + len(output)
        if not output or num_tokens < BLOCK:
            return
        content = _bytes_of([*prompt, *output])
        *_, (num_whole, key) = self._chain(content)
        tail = content[num_whole:]
        known = self._finished.setdefault(key, [])
        if all(each.tail != tail for each in known):
            known.append(Finished(num_tokens, tail, (*segments, Segment(answer_id, len(output)))))
        self._finished.move_to_end(key)
        if len(self._finished) > MAX_FINISHED:
            self._finished.popitem(last=False)

    def _longest(self, content: bytes, num_tokens: int) -> Finished | None:
        """Returns the longest finished request that a prompt continues."""
        finished, found, found_key = self._finished, None, 0
        for start, key in self._chain(content) if finished else ():
            for each in finished.get(key, ()):
                if each.num_tokens <= num_tokens and content.startswith(each.tail, start):
                    found, found_key = each, key
        if found is not None:
            finished.move_to_end(found_key)
        return found

    def _chain(self, content: bytes) -> Iterator[tuple[int, int]]:
        """Yields the number of bytes up to the end of each whole block, and the hash of these bytes."""
        key = self._salt
        for start, end in pairwise(range(0, len(content) + 1, _BYTES)):
            key = hash((key, content[start:end]))
            yield end, key

    def _blocks(self, content: bytes, start: int) -> tuple[Segment, ...]:
        """Returns the segments of the tokens from `start` on."""
        salt, begin = self._salt, 4 * start
        blocks = [content[at : at + _BYTES] for at in range(begin, len(content), _BYTES)]
        return tuple([Segment(hash((salt, block)) & _POSITIVE, len(block) // 4) for block in blocks])


def _bytes_of(token_ids: Sequence[int]) -> bytes:
    return array("I", token_ids).tobytes()
