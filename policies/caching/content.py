"""What the tokens of a sequence are, told in runs: equal places, equal KV.

The KV of a token depends on all tokens before it, so a block is known by the whole sequence up to the block's
end, as in vLLM's chained hashes. That is not computed token by token: contents have names
(`policies.core.request.Segment`), a name behind a given past is a *place*, and the blocks that end within a
run are the place's blocks 0, 1, 2, ...

    tokens     0        16        32        48    53      64
    runs       |------ content 7 ------------|-- content 9 --      blocks of 16
    blocks     |  A 0    |   A 1   |   A 2   |      B 0   |        A: 7 first; B: 9 behind 53 tokens of A
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from hashlib import blake2b

from policies.core.request import Request, Segment

ENDLESS = 1 << 40
"""Tokens, or blocks, of an answer whose length nobody knows."""

OWN_PLACES = 1 << 48
"""Places from here on have contents that only one request can name."""

MANY = 8192
"""New places after which it is time to look which of them are in use: about 2 MB of memory."""


Stretch = tuple[int, int]
"""(place, end): blocks of a sequence that end within one run, those of place, up to the sequence's block end.

A plain tuple, as a prompt has as many as it has pieces.
"""


def prompt_runs(request: Request) -> list[Segment]:
    """The prompt as runs. Contents without a name get one that nobody else has, below 0.

    An adapter changes the KV of every token: with it, contents have names of their own.
    """
    if request.adapter is not None:
        return _cut(request)
    prompt = request.prompt
    num_left = prompt.num_tokens
    for _, num_tokens in prompt.segments:
        num_left -= num_tokens
        if not num_tokens or num_left < 0:
            return _cut(request)
    runs = list(prompt.segments)
    if num_left:
        runs.append(Segment(_own_content(request), num_left))
    return runs


def _cut(request: Request) -> list[Segment]:
    """The runs of a prompt that names empty pieces, or more tokens than it has."""
    runs = []
    num_left = request.prompt.num_tokens
    space = 0 if request.adapter is None else _space(request.adapter)
    for segment in request.prompt.segments:
        num_tokens = min(segment.num_tokens, num_left)
        if num_tokens:
            runs.append(Segment(segment.content_id + space, num_tokens))
            num_left -= num_tokens
    if num_left:
        runs.append(Segment(_own_content(request), num_left))
    return runs


def _own_content(request: Request) -> int:
    """What is in a prompt and has no name."""
    return -2 * request.request_id - 1


def runs_of(request: Request) -> list[Segment]:
    """The prompt, then the answer, as runs; of several answers none, since nobody quotes a branch."""
    runs = prompt_runs(request)
    if request.branching is not None:
        return runs
    runs.append(Segment(_answer(request), ENDLESS))
    return runs


def _answer(request: Request) -> int:
    """The name of an answer, or one below 0 that no other request has."""
    if request.answer_id is None:
        return -2 * request.request_id - 2
    return request.answer_id + (0 if request.adapter is None else _space(request.adapter))


@lru_cache(maxsize=100_000)
def _space(adapter: str) -> int:
    """What an adapter adds to the names of contents, which themselves are below 2^64."""
    return (int.from_bytes(blake2b(adapter.encode(), digest_size=8).digest(), "little") + 1) << 64


def _own_place(content_id: int) -> int:
    """The place of contents below 0: what is before them is the same whenever their request comes."""
    return OWN_PLACES - content_id


class Places:
    """Gives every (past, content) its place: a number."""

    def __init__(self, block_size: int, joins: bool = True) -> None:
        """joins: the end of a prompt and its answer are one place if no other request can name them."""
        self._block_size = block_size
        self._joins = joins
        self._places: dict[tuple[int, int, int], int] = {}  # (place before, its tokens, content) -> place
        self._num_given = 0
        self._num_old = 0  # that had been given when it last forgot
        self._forget_at = MANY

    def path(self, request: Request) -> list[Stretch]:
        """Where the blocks of a request's prompt and answer are found.

        Runs in which no block ends are left out.
        """
        if not request.prompt.segments and self._is_joined(request):
            return [(_own_place(_answer(request)), ENDLESS)]
        path: list[Stretch] = []
        places, block_size = self._places, self._block_size
        before, before_tokens, start, end = -1, 0, 0, 0
        runs = runs_of(request)
        if self._is_joined(request) and len(runs) > 1 and runs[-2][0] < 0:
            del runs[-2]
        for content_id, num_tokens in runs:
            if content_id < 0:
                place = _own_place(content_id)
            else:
                name = (before, before_tokens, content_id)
                place = places.setdefault(name, self._num_given)
                if place == self._num_given:
                    self._num_given += 1
            before, before_tokens = place, num_tokens
            start += num_tokens
            if start - end * block_size >= block_size:
                end = start // block_size
                path.append((place, end))
        return path

    def known_path(self, request: Request) -> list[Stretch]:
        """The path of a prompt as far as its places are known; gives no new ones."""
        path: list[Stretch] = []
        before, before_tokens, start, end = -1, 0, 0, 0
        for content_id, num_tokens in prompt_runs(request):
            if content_id < 0:
                place: int | None = _own_place(_answer(request) if self._is_joined(request) else content_id)
            else:
                place = self._places.get((before, before_tokens, content_id))
            if place is None:
                break
            before, before_tokens = place, num_tokens
            start += num_tokens
            if start // self._block_size > end:
                end = start // self._block_size
                path.append((place, end))
        return path

    def forget(self, used: Collection[int]) -> None:
        """Drop places; who asks now and then needs no more memory in a long life.

        Kept are those in use and the way to them, on which pieces may lie in which no block ends; and those
        given since the last time: sequences that run now will have contents there.
        """
        before = {place: name[0] for name, place in self._places.items()}
        kept: set[int] = set()
        for place in (*used, *range(self._num_old, self._num_given)):
            while place not in kept and place in before:
                kept.add(place)
                place = before[place]
        self._places = {name: place for name, place in self._places.items() if place in kept}
        self._num_old = self._num_given
        self._forget_at = len(self._places) + max(MANY, len(used))

    def _is_joined(self, request: Request) -> bool:
        return self._joins and request.answer_id is None and request.branching is None

    @property
    def is_crowded(self) -> bool:
        """Whether it is time to `forget`."""
        return len(self._places) >= self._forget_at
