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
from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from policies.core.request import Segment

BLOCK = 16
"""Tokens of a prompt that have one content id."""
MAX_SEGMENTS = 500_000
"""Most segments of finished requests that are known, the last ones: some 100 bytes each."""
_BYTES = 4 * BLOCK
_POSITIVE = (1 << 63) - 1


class Finished(NamedTuple):
    """A finished request: its tokens after the last whole block, and the segments of all its tokens."""

    num_tokens: int
    tail: bytes
    segments: tuple[Segment, ...]


class ContentIndex:
    """The contents of requests. Only requests with the same salt share content.

    max_segments: segments of finished requests that are known, the last ones.
    """

    def __init__(self, max_segments: int = MAX_SEGMENTS) -> None:
        self._max_segments = max_segments
        self._finished: OrderedDict[int, list[Finished]] = OrderedDict()
        self._num_segments = 0

    def segments(self, token_ids: Sequence[int], salt: Hashable = None) -> tuple[Segment, ...]:
        """Returns the segments of a prompt."""
        content, salt_key = _bytes_of(token_ids), hash(salt)
        known = self._longest(content, len(token_ids), salt_key)
        if known is None:
            return _blocks(content, 0, salt_key)
        return known.segments + _blocks(content, known.num_tokens, salt_key)

    def finish(
        self,
        prompt: Sequence[int],
        segments: tuple[Segment, ...],
        answer_id: int,
        output: Sequence[int],
        salt: Hashable = None,
    ) -> None:
        """Learns a finished request, whose output has the content id answer_id."""
        num_tokens = len(prompt) + len(output)
        if not output or num_tokens < BLOCK:
            return
        content = _bytes_of([*prompt, *output])
        *_, (num_whole, key) = _chain(content, hash(salt))
        tail = content[num_whole:]
        known = self._finished.setdefault(key, [])
        if all(each.tail != tail for each in known):
            known.append(Finished(num_tokens, tail, (*segments, Segment(answer_id, len(output)))))
            self._num_segments += len(segments) + 1
        self._finished.move_to_end(key)
        while self._num_segments > self._max_segments:
            _, forgotten = self._finished.popitem(last=False)
            self._num_segments -= sum(len(each.segments) for each in forgotten)

    def _longest(self, content: bytes, num_tokens: int, salt_key: int) -> Finished | None:
        """Returns the longest finished request that a prompt continues."""
        finished, found, found_key = self._finished, None, 0
        for start, key in _chain(content, salt_key) if finished else ():
            for each in finished.get(key, ()):
                if each.num_tokens <= num_tokens and content.startswith(each.tail, start):
                    found, found_key = each, key
        if found is not None:
            finished.move_to_end(found_key)
        return found


def _chain(content: bytes, key: int) -> Iterator[tuple[int, int]]:
    """Yields the number of bytes up to the end of each whole block, and the hash of key and these bytes."""
    for start, end in pairwise(range(0, len(content) + 1, _BYTES)):
        key = hash((key, content[start:end]))
        yield end, key


def _blocks(content: bytes, start: int, salt_key: int) -> tuple[Segment, ...]:
    """Returns the segments of the tokens from `start` on."""
    blocks = [content[at : at + _BYTES] for at in range(4 * start, len(content), _BYTES)]
    return tuple([Segment(hash((salt_key, block)) & _POSITIVE, len(block) // 4) for block in blocks])


def _bytes_of(token_ids: Sequence[int]) -> bytes:
    return array("I", token_ids).tobytes()
