"""Identity of the tokens of a sequence, in runs: equal places have equal KV.

The KV of a token depends on all tokens before it, so a block is identified by the whole sequence up to the
block's end, as in vLLM's chained hashes. That is not computed token by token: contents have ids
(`policies.core.request.Segment`), ids behind a given past are a *place*, and the blocks that end within them
are the place's blocks 0, 1, 2, ...

    tokens      0        16        32        48    53      64
    request 1   |------ content 7 ------------|-- content 9 --      blocks of 16
    blocks      |  A 0    |   A 1   |   A 2   |      A 3   |        A: 7, and 9 behind 53 tokens of it
    request 2   |------ content 7 ------------|-- content 5 --
    blocks      |  A 0    |   A 1   |   A 2   |      B 0   |        B: 5 behind 53 tokens of A
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from hashlib import blake2b
from operator import itemgetter
from typing import NamedTuple

from policies.core.request import Request, Segment

ENDLESS = 1 << 40
"""Number of tokens, or blocks, of an answer of unknown length."""

PRIVATE_PLACES = 1 << 48
"""Places from here on have contents that only one request can name."""

MIN_PIECES_TO_FORGET = 8192
"""Number of new pieces after which unused places are dropped: about 2 MB of memory."""


_num_tokens = itemgetter(1)
"""Number of tokens of a segment."""

PathPart = tuple[int, int]
"""(place, end): blocks of a sequence that end at one place, up to the sequence's block end. A plain tuple."""


def prompt_runs(request: Request) -> list[Segment]:
    """The prompt as runs. Contents without an id get a unique one, below 0.

    An adapter changes the KV of every token: with it, contents have separate ids.
    """
    if request.adapter is not None:
        return _clipped_runs(request)
    num_prompt_tokens, segments, _ = request.prompt
    runs = list(segments)
    num_left = num_prompt_tokens
    if runs:
        _, num_tokens = zip(*runs, strict=True)
        num_left -= sum(num_tokens)
        if num_left < 0 or not all(num_tokens):
            return _clipped_runs(request)
    if num_left:
        runs.append(Segment(_private_content(request), num_left))
    return runs


def _clipped_runs(request: Request) -> list[Segment]:
    """The runs of a prompt with empty segments, or with more tokens in segments than it has."""
    runs = []
    num_left = request.prompt.num_tokens
    space = 0 if request.adapter is None else _adapter_offset(request.adapter)
    for segment in request.prompt.segments:
        num_tokens = min(segment.num_tokens, num_left)
        if num_tokens:
            runs.append(Segment(segment.content_id + space, num_tokens))
            num_left -= num_tokens
    if num_left:
        runs.append(Segment(_private_content(request), num_left))
    return runs


def _private_content(request: Request) -> int:
    """Id of a prompt's content without an id."""
    return -2 * request.request_id - 1


def runs_of(request: Request) -> list[Segment]:
    """The prompt, then the answer, as runs; several answers are left out, since no prompt quotes a branch."""
    runs = prompt_runs(request)
    if request.branching is not None:
        return runs
    runs.append(Segment(_answer_content(request), ENDLESS))
    return runs


def _answer_content(request: Request) -> int:
    """The id of an answer, or a unique one below 0."""
    if request.answer_id is None:
        return -2 * request.request_id - 2
    return request.answer_id + (0 if request.adapter is None else _adapter_offset(request.adapter))


@lru_cache(maxsize=100_000)
def _adapter_offset(adapter: str) -> int:
    """Offset that an adapter adds to the ids of contents, which themselves are below 2^64."""
    return (int.from_bytes(blake2b(adapter.encode(), digest_size=8).digest(), "little") + 1) << 64


def _private_place(content_id: int) -> int:
    """The place of contents below 0, which depends on the id only: their past is always the same."""
    return PRIVATE_PLACES - content_id


class Chain:
    """Pieces at one place: all but the last have fixed lengths, the last one may continue without a limit."""

    __slots__ = ("body", "last_id", "num_body_tokens", "place")

    def __init__(self, place: int, pieces: list[Segment]) -> None:
        self.place = place
        self.body = pieces[:-1]
        self.num_body_tokens = sum(map(_num_tokens, self.body))
        self.last_id = pieces[-1].content_id

    def follow(self, runs: list[Segment], index: int, skip: int) -> tuple[int, int, int]:
        """Follows runs from the one at `index` on, whose first `skip` tokens lie before the chain.

        Returns the index of the next run, the number of tokens until there, and how many of that run's tokens
        are among them: if there are some, runs has only its other tokens.
        """
        body = self.body
        if runs[index : index + len(body)] == body:
            index += len(body)
            if index < len(runs) and runs[index][0] == self.last_id:
                return index + 1, self.num_body_tokens + runs[index][1], 0
            return index, self.num_body_tokens, 0
        num_followed = 0
        for (content_id, num_tokens), (own_id, num_own) in zip(runs[index:], body, strict=False):
            if content_id != own_id:
                break
            if num_tokens > num_own:
                runs[index] = Segment(content_id, num_tokens - num_own)
                return index, num_followed + num_own, num_own if num_followed else skip + num_own
            num_followed += num_tokens
            index += 1
            if num_tokens < num_own:
                break
        return index, num_followed, 0


class TurnPath(NamedTuple):
    """Path of a request up to its answer; a next turn that quotes the answer continues from there."""

    segments: tuple[Segment, ...]
    num_tokens: int
    path: list[PathPart]
    place: int
    used: int
    """Number of tokens of the answer's place that lie before the answer."""


class Places:
    """Gives every (past, content) its place: a number.

    A place continues from piece to piece, as its first request did. Other requests branch off where they
    differ.
    """

    def __init__(self, block_size: int, is_by_piece: bool = False) -> None:
        """is_by_piece: whether every piece of a request has a place of its own."""
        self._block_size = block_size
        self._is_by_piece = is_by_piece
        self._chains: dict[tuple[int, int, int, int], Chain] = {}
        """Chains by (place before, its tokens, content, the content's tokens at the place before)."""
        self._num_pieces = 0  # number of pieces of all chains
        self._num_given = 0
        self._num_old = 0  # places given before the last `forget_unused`
        self._forget_at = MIN_PIECES_TO_FORGET
        self._turn_paths: dict[int, TurnPath] = {}  # by answer id, for answers not quoted yet

    def path(self, request: Request) -> list[PathPart]:
        """The path of a request: the places of the blocks of its prompt and answer.

        Stretches in which no block ends are left out.
        """
        is_joined = request.answer_id is None and request.branching is None and not self._is_by_piece
        if is_joined and not request.prompt.segments:
            return [(PRIVATE_PLACES + 2 * request.request_id + 2, ENDLESS)]
        if not (is_joined or self._is_by_piece) and request.adapter is None and request.branching is None:
            return self._path_of_turn(request)
        runs = runs_of(request)
        if is_joined and len(runs) > 1 and runs[-2][0] < 0:
            del runs[-2]
        return self._follow(runs, creates=True)[0]

    def _path_of_turn(self, request: Request) -> list[PathPart]:
        """Path of a request with a named answer; continues the last turn's path if it quotes its answer."""
        prompt, answer_id = request.prompt, request.answer_id
        assert answer_id is not None
        segments = prompt.segments
        last_turn = self._turn_paths.pop(segments[-2][0], None) if len(segments) > 1 else None
        if last_turn is None or last_turn.segments != segments[:-2]:
            runs = runs_of(request)
            is_named = len(runs) == len(segments) + 1
            path, place, used = self._follow(runs, creates=True)
        else:
            num_quoted, num_new = segments[-2][1], segments[-1][1]
            start = last_turn.num_tokens + num_quoted
            if not num_quoted or not num_new or start + num_new != prompt.num_tokens:
                return self._follow(runs_of(request), creates=True)[0]
            runs = [segments[-1], Segment(answer_id, ENDLESS)]
            is_named = True
            path, end = last_turn.path, start // self._block_size
            if end > (path[-1][1] if path else 0):
                path.append((last_turn.place, end))
            at = (last_turn.place, last_turn.used + num_quoted, start)
            path, place, used = self._follow(runs, creates=True, path=path, at=at)
        if is_named and runs[-1][1] == ENDLESS:
            self._turn_paths[answer_id] = TurnPath(
                segments, prompt.num_tokens, path[:-1], place, used - ENDLESS
            )
        return path

    def known_path(self, request: Request) -> list[PathPart]:
        """The path of a prompt as far as its places are known; creates no new ones."""
        runs = prompt_runs(request)
        if runs[-1][0] < 0 and self._is_joined(request):
            runs[-1] = Segment(_answer_content(request), runs[-1][1])
        return self._follow(runs, creates=False)[0]

    def forget_unused(self, used: Collection[int]) -> None:
        """Drops unused places, so that a long run needs no more memory.

        Kept are the places in use and the way to them, which may include pieces in which no block ends; and
        those created since the last call, as running sequences will have contents there.
        """
        before = {chain.place: name[0] for name, chain in self._chains.items()}
        kept: set[int] = set()
        for place in (*used, *range(self._num_old, self._num_given)):
            while place not in kept and place in before:
                kept.add(place)
                place = before[place]
        self._chains = {name: chain for name, chain in self._chains.items() if chain.place in kept}
        self._num_pieces = sum(len(chain.body) + 1 for chain in self._chains.values())
        self._num_old = self._num_given
        self._forget_at = self._num_pieces + max(MIN_PIECES_TO_FORGET, len(used))
        self._turn_paths.clear()

    @property
    def should_forget(self) -> bool:
        """Whether it is time to call `forget_unused`."""
        return self._num_pieces >= self._forget_at

    def _is_joined(self, request: Request) -> bool:
        """Whether the end of its prompt and its answer are one place, as no other request can name them."""
        return not self._is_by_piece and request.answer_id is None and request.branching is None

    def _follow(
        self,
        runs: list[Segment],
        creates: bool,
        path: list[PathPart] | None = None,
        at: tuple[int, int, int] = (-1, 0, 0),
    ) -> tuple[list[PathPart], int, int]:
        """The path along runs, the last place, and the number of its tokens that are among them.

        path, at: the path of what is before them; its last place, that place's tokens, and all tokens. A run
        that continues at another place is cut in `runs`, which then has its rest.
        """
        path = [] if path is None else path
        chains, block_size, num_runs = self._chains, self._block_size, len(runs)
        before, used, start = at
        end = path[-1][1] if path else 0
        index = skip = 0  # the next run, and how many of its tokens are at the place before
        while index < num_runs:
            content_id = runs[index][0]
            if content_id < 0:
                before, used, skip = _private_place(content_id), runs[index][1], 0
                index += 1
            else:
                name = (before, used, content_id, skip)
                chain = chains.get(name)
                if chain is None:
                    if not creates:
                        break
                    chain = chains[name] = self._new_chain(runs, index)
                before = chain.place
                index, used, skip = chain.follow(runs, index, skip)
            start += used
            if start - end * block_size >= block_size:
                end = start // block_size
                path.append((before, end))
        return path, before, used

    def _new_chain(self, runs: list[Segment], first: int) -> Chain:
        """Creates a chain of the run `first` and the named runs behind it."""
        end = first + 1
        if not self._is_by_piece:
            end = len(runs)
            for index in range(max(first + 1, end - 2), end):  # only the last two may have none
                if runs[index][0] < 0:
                    end = index
                    break
        chain = Chain(self._num_given, runs[first:end])
        self._num_given += 1
        self._num_pieces += end - first
        return chain
