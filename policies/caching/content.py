"""What the tokens of a sequence are, told in runs and in keys of blocks: equal keys, equal KV.

The KV of a token depends on all tokens before it, so the key of a block stands for the whole sequence up to the
block's end, as vLLM's chained hashes do. It is not computed token by token: contents have names
(`policies.request.Segment`), a name behind a given past is a *place*, and the blocks that end within a run
have consecutive keys from the place's first one on.

    tokens     0        16        32        48    53      64
    runs       |------ content 7 ------------|-- content 9 --      blocks of 16
    keys       |   p7    |  p7 + 1 |  p7 + 2 |   p9       |  p9 = place of (p7, 48 tokens, 9)
"""

from __future__ import annotations

from collections.abc import Iterable

from policies.request import Request, Segment

_PLACE = 1 << 24  # keys of one place: blocks that may end within a run


def runs_of(request: Request) -> list[Segment]:
    """The prompt, then the answer, as runs. Contents without a name get one that nobody else has, below 0."""
    num_left = request.prompt.num_tokens
    runs = []
    for segment in request.prompt.segments:
        num_tokens = min(segment.num_tokens, num_left)
        if num_tokens:
            runs.append(
                segment if num_tokens == segment.num_tokens else Segment(segment.content_id, num_tokens)
            )
            num_left -= num_tokens
    if num_left:
        runs.append(Segment(-2 * request.request_id - 1, num_left))
    answer_id = -2 * request.request_id - 2 if request.answer_id is None else request.answer_id
    runs.append(Segment(answer_id, _PLACE))  # as long as it takes
    return runs


class Places:
    """Gives every (past, content) its place: a number, from which block keys count up."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._places: dict[tuple[int, int, int], int] = {}  # (place before, its tokens, content) -> place
        self._next = 0
        self._forget_at = 100_000

    def keys(self, request: Request, num_tokens: int) -> list[int]:
        """Keys of the full blocks within the first num_tokens tokens of a request's prompt and answer."""
        block_size, places = self._block_size, self._places
        num_blocks = num_tokens // block_size
        keys: list[int] = []
        before, before_tokens, start = -1, 0, 0
        for content_id, run_tokens in runs_of(request):
            path = (before, before_tokens, content_id)
            place = places.get(path)
            if place is None:
                place = places[path] = self._next
                self._next += _PLACE
            start += run_tokens
            end_block = start // block_size
            num_keys = (end_block if end_block < num_blocks else num_blocks) - len(keys)
            if num_keys > 0:
                keys.extend(range(place, place + num_keys))
            if len(keys) >= num_blocks:
                return keys
            before, before_tokens = place, run_tokens
        return keys

    def forget(self, used_keys: Iterable[int]) -> None:
        """Now and then, drop the places of which no key is in use, so that a long life needs no more memory."""
        if len(self._places) < self._forget_at:
            return
        used = {key // _PLACE for key in used_keys}
        self._places = {path: place for path, place in self._places.items() if place // _PLACE in used}
        self._forget_at = max(100_000, 2 * len(self._places))
