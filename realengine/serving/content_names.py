"""Content ids of tokens, so that a cache that compares ids finds what another request has computed.

Policies know prompts as `Segment`s, runs of tokens whose content has an id. This module assigns ids to
tokens. Known text is recognised at block boundaries by a chain of hashes over its blocks; new text gets new
ids. An output is one run under its request's answer_id; after its end, its tokens are known text as well.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import count

import numpy as np

from policies.core.request import Segment


class ContentNames:
    """Known texts; the least recently used are dropped first. block_size: in tokens, the unit of reuse."""

    def __init__(self, block_size: int, max_blocks: int = 1 << 20) -> None:
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._ids = count()
        self._known: OrderedDict[bytes, tuple[Segment, ...]] = (
            OrderedDict()
        )  # a block's pieces by the hash of its chain

    def new_id(self) -> int:
        """Returns a content id that no other content has."""
        return next(self._ids)

    def name(
        self, tokens: Sequence[int], lora: str | None = None, salt: str = "", *, as_new: bool = False
    ) -> tuple[Segment, ...]:
        """Returns the segments of a prompt: known ones as far as they match, then one new id per block.

        lora: the adapter with which their KV is computed. salt: texts with different salts share no id.
        as_new: the prompt gets new ids only, so that no KV of another request is found for it.
        """
        chain = chain_of(tokens, self._block_size, lora, salt)
        pieces: list[Segment] = []
        num_named = 0
        for link in () if as_new else chain:
            known = self._known.get(link)
            if known is None:
                break
            self._known.move_to_end(link)
            pieces += known
            num_named += self._block_size
        for start in range(num_named, len(tokens), self._block_size):
            pieces.append(Segment(self.new_id(), min(self._block_size, len(tokens) - start)))
        segments = _merged(pieces)
        self._learn(chain, segments)
        return segments

    def learn(
        self,
        tokens: Sequence[int],
        prompt: tuple[Segment, ...],
        answer_id: int,
        lora: str | None = None,
        salt: str = "",
    ) -> None:
        """Adds `tokens`, the prompt and output of an ended request, to the known texts."""
        num_answer = len(tokens) - sum(segment.num_tokens for segment in prompt)
        if num_answer > 0:
            self._learn(
                chain_of(tokens, self._block_size, lora, salt), (*prompt, Segment(answer_id, num_answer))
            )

    def _learn(self, chain: list[bytes], segments: tuple[Segment, ...]) -> None:
        """Splits segments at block boundaries, and stores each block's pieces under its hash."""
        pieces: list[Segment] = []
        room = self._block_size
        links = iter(chain)
        for content_id, num_tokens in segments:
            while num_tokens:
                num_here = min(num_tokens, room)
                pieces.append(Segment(content_id, num_here))
                num_tokens -= num_here
                room -= num_here
                if room:
                    continue
                link = next(links)
                self._known.setdefault(link, tuple(pieces))
                self._known.move_to_end(link)
                pieces, room = [], self._block_size
        while len(self._known) > self._max_blocks:
            self._known.popitem(last=False)


def chain_of(
    tokens: Sequence[int],
    block_size: int,
    lora: str | None = None,
    salt: str = "",
    known: Sequence[bytes] = (),
) -> list[bytes]:
    """Returns the hashes of a text up to the end of each full block. lora, salt: see `ContentNames.name`.

    known: the first of them, which are not computed again.
    """
    chain, link = list(known), b"" if lora is None else b"lora:" + lora.encode()
    if salt:
        link = blake2b(link + b"\0salt:" + salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    if chain:
        link = chain[-1]
    array = np.asarray(tokens, np.int64)
    for end in range((len(chain) + 1) * block_size, len(array) + 1, block_size):
        link = blake2b(link + array[end - block_size : end].tobytes(), digest_size=16).digest()
        chain.append(link)
    return chain


def _merged(pieces: list[Segment]) -> tuple[Segment, ...]:
    """Merges neighbouring pieces with the same id."""
    runs: list[Segment] = []
    for piece in pieces:
        if runs and runs[-1].content_id == piece.content_id:
            runs[-1] = Segment(piece.content_id, runs[-1].num_tokens + piece.num_tokens)
        else:
            runs.append(piece)
    return tuple(runs)
