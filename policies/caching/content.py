"""Identifies the content of KV blocks, so that equal prefixes of different requests have equal ids.

The KV of a token depends on all tokens before it, so a block is identified by all tokens up to its end, as in
vLLM's chained block hashes. Tokens are not hashed one by one here. Prompts are given as segments with content
ids (`policies.core.request.Segment`), and the segments of all requests form a tree of prefixes: two requests
share its nodes up to the point where they differ. A node of the tree is called a *place* and is a number. The
blocks that end within the tokens of a place are its blocks 0, 1, 2, ..., and (place, number of the block)
acts as the block hash.

    tokens      0        16        32        48    53      64
    request 1   |------ content 7 ------------|-- content 9 --      blocks of 16 tokens
    blocks      |  A 0    |   A 1   |   A 2   |      A 3   |        place A: content 7, then content 9
    request 2   |------ content 7 ------------|-- content 5 --
    blocks      |  A 0    |   A 1   |   A 2   |      B 0   |        place B: content 5 after 53 tokens of A

A place continues over several segments, like the first request's; a request that differs branches off to a
new place. The *path* of a request is the list of its places, with the block at which each ends. Content
without an id, such as an output that no later prompt contains, is at a *private* place: only its own request
can refer to it.

Listeners to the contents of a cache feed a router's external index (vLLM's KV events). The next uses of
content by future requests serve offline bounds such as Belady's. For these, a position in a prompt is
identified by its history, a hash of the whole segments before it, and the content id of its segment.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable
from collections.abc import Sequence as SequenceOf
from functools import lru_cache
from hashlib import blake2b
from operator import itemgetter
from typing import NamedTuple, Protocol

from policies.core.request import Request, Segment
from policies.core.sequence import LOADING, PREFILLING, Sequence

ENDLESS = 1 << 40
"""Number of tokens or blocks used for an output of unknown length."""

PRIVATE_PLACES = 1 << 48
"""The smallest private place. Only one request can find the content of a private place."""

NAMELESS_PLACE = 1 << 62
"""The place of content that no request can find, because its request has ended and had no content ids."""

MIN_SEGMENTS_TO_FORGET = 2048
"""Number of new segments in the tree after which unused places are dropped: about 0.5 MB of memory."""


_num_tokens = itemgetter(1)
"""Returns the number of tokens of a segment."""

PathPart = tuple[int, int]
"""(place, end): the blocks of a sequence at one place, up to block `end` of the sequence (exclusive)."""


def of_rank(request: Request, rank: int) -> Request:
    """Returns a copy of a request whose content is shared only within one rank of data-parallel attention.

    Each rank has its own KV memory, so contents of other ranks give no hit. As with adapters, the ids of all
    contents are offset.
    """
    return request if not rank else request._replace(adapter=f"{request.adapter or ''}@{rank}")


def prompt_segments(request: Request) -> list[Segment]:
    """Returns the prompt as segments that cover all its tokens.

    A part without a content id gets a unique id below 0. An adapter changes the KV of every token, so it adds
    an offset to the ids.
    """
    if request.adapter is not None:
        return _clipped_segments(request)
    num_prompt_tokens, given, _ = request.prompt
    segments = list(given)
    num_left = num_prompt_tokens
    if segments:
        _, num_tokens = zip(*segments, strict=True)
        num_left -= sum(num_tokens)
        if num_left < 0 or not all(num_tokens):
            return _clipped_segments(request)
    if num_left:
        segments.append(Segment(_private_content(request), num_left))
    return segments


def _clipped_segments(request: Request) -> list[Segment]:
    """Returns `prompt_segments` in the general case: with an adapter, empty segments, or too many tokens."""
    segments = []
    num_left = request.prompt.num_tokens
    space = 0 if request.adapter is None else _adapter_offset(request.adapter)
    for segment in request.prompt.segments:
        num_tokens = min(segment.num_tokens, num_left)
        if num_tokens:
            segments.append(Segment(segment.content_id + space, num_tokens))
            num_left -= num_tokens
    if num_left:
        segments.append(Segment(_private_content(request), num_left))
    return segments


def _private_content(request: Request) -> int:
    """Returns the unique id, below 0, for the part of a prompt without a content id."""
    return -2 * request.request_id - 1


def all_segments(request: Request) -> list[Segment]:
    """Returns prompt and output as segments, without outputs with branches, which no prompt contains."""
    segments = prompt_segments(request)
    if request.branching is not None:
        return segments
    segments.append(Segment(_answer_content(request), ENDLESS))
    return segments


def _answer_content(request: Request) -> int:
    """Returns the content id of the output of a request; a unique id below 0 if it has none."""
    if request.answer_id is None:
        return -2 * request.request_id - 2
    return request.answer_id + (0 if request.adapter is None else _adapter_offset(request.adapter))


@lru_cache(maxsize=100_000)
def _adapter_offset(adapter: str) -> int:
    """Returns the offset that an adapter adds to content ids, which are below 2^64 without it."""
    return (int.from_bytes(blake2b(adapter.encode(), digest_size=8).digest(), "little") + 1) << 64


def _private_place(content_id: int) -> int:
    """Returns the private place of a content id below 0; it depends only on the id, like its prefix."""
    return PRIVATE_PLACES - content_id


class Chain:
    """The segments of one place. All except the last have a fixed length; the last is open-ended."""

    __slots__ = ("body", "last_id", "num_body_tokens", "place")

    def __init__(self, place: int, segments: list[Segment]) -> None:
        self.place = place
        self.body = segments[:-1]
        self.num_body_tokens = sum(map(_num_tokens, self.body))
        self.last_id = segments[-1].content_id

    def follow(self, segments: list[Segment], index: int, skip: int) -> tuple[int, int, int]:
        """Follows the segments of a request, from segments[index] on, as long as they equal the chain's.

        skip: tokens of the segment at `index` that are before the chain. Returns the index of the first
        segment that is not completely in the chain, the number of equal tokens, and the number of that
        segment's tokens that are in the chain or before it. If there are such tokens, segments[index] is
        replaced by its rest.
        """
        body = self.body
        if segments[index : index + len(body)] == body:
            index += len(body)
            if index < len(segments) and segments[index][0] == self.last_id:
                return index + 1, self.num_body_tokens + segments[index][1], 0
            return index, self.num_body_tokens, 0
        num_followed = 0
        for (content_id, num_tokens), (chain_id, num_in_chain) in zip(segments[index:], body, strict=False):
            if content_id != chain_id:
                break
            if num_tokens > num_in_chain:
                segments[index] = Segment(content_id, num_tokens - num_in_chain)
                return index, num_followed + num_in_chain, num_in_chain + (0 if num_followed else skip)
            num_followed += num_tokens
            index += 1
            if num_tokens < num_in_chain:
                break
        return index, num_followed, 0


class TurnPath(NamedTuple):
    """The path of a turn of a conversation up to its output; the next turn continues from there."""

    segments: tuple[Segment, ...]
    num_tokens: int
    path: list[PathPart]
    place: int
    used: int
    """Number of tokens of `place` before the output."""


class Places:
    """The tree of prefixes: assigns a place to every (prefix, content)."""

    def __init__(self, block_size: int, is_per_segment: bool = False, lookahead: int = 0) -> None:
        """Creates an empty tree.

        is_per_segment: whether every segment of a request has its own place. lookahead: tokens after a block
        that belong to its content: a block belongs to the place of the last of these tokens.
        """
        self._block_size = block_size
        self._lookahead = lookahead
        self._is_per_segment = is_per_segment
        self._chains: dict[tuple[int, int, int, int], Chain] = {}
        """Children of places by (parent, its tokens, content id, tokens of the content in the parent)."""
        self._num_segments = 0  # number of segments of all chains
        self._num_given = 0  # number of places
        self._num_old = 0  # number of places at the last `forget_unused`
        self._forget_at = MIN_SEGMENTS_TO_FORGET
        self._turn_paths: dict[int, TurnPath] = {}  # by answer id, for outputs in no prompt so far

    def path(self, request: Request) -> list[PathPart]:
        """Returns the path of a request's prompt and output, and creates missing places.

        Places in which no block ends are left out.
        """
        is_joined = request.answer_id is None and request.branching is None and not self._is_per_segment
        if is_joined and not request.prompt.segments:
            return [(PRIVATE_PLACES + 2 * request.request_id + 2, ENDLESS)]
        if not (is_joined or self._is_per_segment) and request.adapter is None and request.branching is None:
            return self._path_of_turn(request)
        segments = all_segments(request)
        if is_joined and len(segments) > 1 and segments[-2][0] < 0:
            del segments[-2]
        return self._follow(segments, creates=True)[0]

    def _path_of_turn(self, request: Request) -> list[PathPart]:
        """Returns the path of a request with an answer id; continues the path of the previous turn, if any.

        A request is the next turn if its prompt is the previous prompt, its output, and one more segment.
        """
        prompt, answer_id = request.prompt, request.answer_id
        assert answer_id is not None
        given = prompt.segments
        last_turn = self._turn_paths.pop(given[-2][0], None) if len(given) > 1 else None
        if last_turn is None or last_turn.segments != given[:-2]:
            segments = all_segments(request)
            is_named = len(segments) == len(given) + 1
            path, place, used = self._follow(segments, creates=True)
        else:
            num_quoted, num_new = given[-2][1], given[-1][1]
            start = last_turn.num_tokens + num_quoted
            if not num_quoted or not num_new or start + num_new != prompt.num_tokens:
                return self._follow(all_segments(request), creates=True)[0]
            segments = [given[-1], Segment(answer_id, ENDLESS)]
            is_named = True
            path, end = last_turn.path, (start - self._lookahead) // self._block_size
            if end > (path[-1][1] if path else 0):
                path.append((last_turn.place, end))
            at = (last_turn.place, last_turn.used + num_quoted, start)
            path, place, used = self._follow(segments, creates=True, path=path, at=at)
        if is_named and segments[-1][1] == ENDLESS:
            self._turn_paths[answer_id] = TurnPath(given, prompt.num_tokens, path[:-1], place, used - ENDLESS)
        return path

    def known_path(self, request: Request) -> list[PathPart]:
        """Returns the path of a prompt as far as its places exist; creates no places."""
        segments = prompt_segments(request)
        if segments[-1][0] < 0 and self._is_joined(request):
            segments[-1] = Segment(_answer_content(request), segments[-1][1])
        return self._follow(segments, creates=False)[0]

    def forget_unused(self, used: Collection[int]) -> None:
        """Drops unused places, so that the memory does not grow in a long run.

        Keeps the used places and their ancestors (some have no blocks), and all places created since the last
        call, because running sequences may get blocks there.
        """
        before = {chain.place: name[0] for name, chain in self._chains.items()}
        kept: set[int] = set()
        for place in (*used, *range(self._num_old, self._num_given)):
            while place not in kept and place in before:
                kept.add(place)
                place = before[place]
        self._chains = {name: chain for name, chain in self._chains.items() if chain.place in kept}
        self._num_segments = sum(len(chain.body) + 1 for chain in self._chains.values())
        self._num_old = self._num_given
        self._forget_at = self._num_segments + max(MIN_SEGMENTS_TO_FORGET, len(used))
        self._turn_paths.clear()

    @property
    def should_forget(self) -> bool:
        """True if enough segments were added that `forget_unused` should be called."""
        return self._num_segments >= self._forget_at

    def _is_joined(self, request: Request) -> bool:
        """Returns whether the end of a prompt and the output are at one private place."""
        return not self._is_per_segment and request.answer_id is None and request.branching is None

    def _follow(
        self,
        segments: list[Segment],
        creates: bool,
        path: list[PathPart] | None = None,
        at: tuple[int, int, int] = (-1, 0, 0),
    ) -> tuple[list[PathPart], int, int]:
        """Follows the segments through the tree; returns path, last place, and the tokens used of that place.

        creates: whether missing places are created; if not, the path ends before the first missing one.
        path: the path of the tokens before these segments. at: (last place, tokens used of it, all tokens) of
        that path. A segment that continues at another place is replaced by its rest in `segments`.
        """
        path = [] if path is None else path
        chains, block_size, num_segments = self._chains, self._block_size, len(segments)
        before, used, start = at
        start -= self._lookahead
        end = path[-1][1] if path else 0
        index = skip = 0  # the next segment, and how many of its tokens are at the previous place
        while index < num_segments:
            content_id = segments[index][0]
            if content_id < 0:
                before, used, skip = _private_place(content_id), segments[index][1], 0
                index += 1
            else:
                name = (before, used, content_id, skip)
                chain = chains.get(name)
                if chain is None:
                    if not creates:
                        break
                    chain = chains[name] = self._new_chain(segments, index)
                before = chain.place
                index, used, skip = chain.follow(segments, index, skip)
            start += used
            if start - end * block_size >= block_size:
                end = start // block_size
                path.append((before, end))
        return path, before, used

    def _new_chain(self, segments: list[Segment], first: int) -> Chain:
        """Creates a place with segments[first] and the segments with a content id after it."""
        end = first + 1
        if not self._is_per_segment:
            end = len(segments)
            for index in range(max(first + 1, end - 2), end):  # only the last two may have no content id
                if segments[index][0] < 0:
                    end = index
                    break
        chain = Chain(self._num_given, segments[first:end])
        self._num_given += 1
        self._num_segments += end - first
        return chain


class ContentListener(Protocol):
    """A listener to the blocks that a pool offers to lookups.

    names: the names of blocks, unique while they are offered. Blocks that only their own request can find
    (`content.PRIVATE_PLACES`) are not reported.
    """

    def stored(self, request_id: int, first: int, names: SequenceOf[Hashable]) -> None:
        """Handles new contents: the full blocks first, first + 1, ... of a request's tokens."""

    def removed(self, names: SequenceOf[Hashable]) -> None:
        """Handles contents that are no longer in the cache: evicted, or never computed."""

    def stored_below(self, tier: str, names: SequenceOf[Hashable]) -> None:
        """Handles contents that are copied to a tier below the GPU: consecutive blocks of one place.

        The GPU or another tier has them, or has lost them since the last plan.
        """

    def removed_below(self, tier: str, names: SequenceOf[Hashable]) -> None:
        """Handles contents that a tier below the GPU no longer has."""


NO_HISTORY = 0


def extend_history(history: int, segments: Iterable[Segment]) -> int:
    """Returns the history after further segments; it is the same in every process."""
    for content_id, num_tokens in segments:
        history = hash((history, content_id, num_tokens))
    return history


class FutureUses:
    """The future requests by the positions that they use. now: index of the last request that has begun."""

    def __init__(self, prompts: SequenceOf[tuple[Segment, ...]]) -> None:
        """Records all requests. prompts: the segments of each, in the order of arrival."""
        self.now = -1
        self._uses: defaultdict[tuple[int, int], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        for index, segments in enumerate(prompts):
            history = NO_HISTORY
            for segment in segments:
                indices, lengths = self._uses[history, segment[0]]
                indices.append(index)
                lengths.append(segment[1])
                history = extend_history(history, (segment,))

    def begin(self, index: int) -> None:
        """Records that request `index` and all before it have begun and are no longer future uses."""
        self.now = max(self.now, index)

    def next_use(self, history: int, content_id: int, num_tokens: int) -> float:
        """Returns the index of the next request with at least num_tokens tokens of a segment; inf if none."""
        indices, lengths = self._uses.get((history, content_id), ((), ()))
        for i in range(bisect_right(indices, self.now), len(indices)):
            if lengths[i] >= num_tokens:
                return indices[i]
        return math.inf


Offer = Callable[[Sequence, int], None]
"""Offers the given number of leading blocks of a sequence."""


class Answers:
    """The running sequences that generate answers with a content id, by the place of the answer.

    offer: offers blocks in the pool. lookahead: tokens after a block that belong to its content.
    num_readable: returns the number of leading tokens of a running sequence that are known and computed; the
    engine sets it (`BlockPool.watch`).

    The answers of running sequences with content ids that other requests can look up.

    As in vLLM, a generated block is offered to others when its last token is known and has been computed or
    will be in the current step. No work is done per token: the blocks of a place (`content.Places`) are
    offered when a lookup could find them, or when a sequence adds or frees blocks there. Decoding sequences
    advance together, so the sequence that is ahead filled each block first; between two at the same token,
    the one admitted first did. This decides which of two equal blocks is the copy.
    """

    def __init__(self, offer: Offer, block_size: int, lookahead: int = 0) -> None:
        self.num_readable: Callable[[Sequence], int] = _num_computed
        self._offer_now = offer
        self._block_size = block_size
        self._lookahead = lookahead
        self.writers: dict[int, dict[int, Sequence]] = {}
        """The running sequences that generate tokens at each place of answers, by request id."""
        self.num_shared = 0
        """Number of places at which several sequences generate tokens."""

    def begin(self, seq: Sequence) -> None:
        """Adds an admitted sequence with one content id for its answer; ignores one with several."""
        for place in self._places(seq):
            writers = self.writers.setdefault(place, {})
            writers[seq.request_id] = seq
            self.num_shared += len(writers) == 2

    def is_shared(self, seq: Sequence) -> bool:
        """Returns whether other running sequences also generate the answer of a sequence."""
        return any(len(self.writers.get(place, ())) > 1 for place in self._places(seq))

    def offer(self, seq: Sequence) -> None:
        """Offers the generated blocks of a sequence and of others with an equal answer, if there are any."""
        for place in self._places(seq):
            if len(writers := self.writers[place]) > 1:
                self._offer_all(writers)

    def end(self, seq: Sequence, num_full: int) -> None:
        """Removes a sequence that frees its blocks; the first num_full blocks are full."""
        for place in self._places(seq):
            writers = self.writers[place]
            if len(writers) == 1:
                del self.writers[place]
                continue
            self._offer_all(writers, seq, num_full)
            del writers[seq.request_id]
            self.num_shared -= len(writers) == 1

    def _places(self, seq: Sequence) -> list[int]:
        """Returns the places of a sequence's answer: several if a prompt has quoted only its beginning."""
        if seq.request.branching is not None:
            return []
        num_prompt_blocks = max(seq.num_prompt_tokens - self._lookahead, 0) // self._block_size
        return [place for place, end in seq.kv.path if end > num_prompt_blocks]

    def num_generated(self, seq: Sequence) -> int:
        """Counts a running sequence's leading known and computed tokens; 0 before it decodes."""
        return 0 if seq.state is PREFILLING or seq.state is LOADING else self.num_readable(seq)

    def offer_for(self, path: list[PathPart], num_blocks: int) -> bool:
        """Offers the generated blocks among the first num_blocks blocks of a path.

        Returns whether a later lookup may find more.
        """
        may_grow = False
        for place, end in path:
            writers = self.writers.get(place)
            if writers is not None:
                upto = min(end, num_blocks)
                if self._lags(writers, upto):
                    self._offer_all(writers)
                    may_grow = may_grow or self._lags(writers, upto)
            if end >= num_blocks:
                break
        return may_grow

    def offer_before(self, seq: Sequence) -> bool:
        """Offers blocks that others have generated at a place to which a sequence in prefill adds blocks.

        Returns whether they may generate more there; if so, the order of its chunks and their tokens matters.
        """
        is_shared = False
        num_known = max(seq.stored_known - self._lookahead, 0) // self._block_size
        for place, end in seq.kv.path:
            if end > seq.kv.num_with_content:
                writers = self.writers.get(place)
                if writers is not None and (len(writers) > 1 or seq.request_id not in writers):
                    self._offer_all(writers, seq)
                    is_shared = True
            if end >= num_known:
                break
        return is_shared

    def _offer_all(
        self, writers: dict[int, Sequence], but: Sequence | None = None, num_full: int = 0
    ) -> None:
        """Offers the full blocks of all writers of a place in the order of their progress.

        but: a sequence that offers only num_full blocks.
        """
        for seq in sorted(writers.values(), key=lambda seq: (-seq.num_computed, seq.admission)):
            num_offered = num_full if seq is but else self.num_generated(seq) // self._block_size
            if num_offered > seq.kv.num_with_content:
                self._offer_now(seq, num_offered)

    @staticmethod
    def _lags(writers: dict[int, Sequence], num_blocks: int) -> bool:
        """Returns whether a sequence may have generated, or will generate, one of the first num_blocks."""
        for seq in writers.values():
            has_generated = seq.state is not PREFILLING and seq.state is not LOADING
            if has_generated and seq.kv.num_with_content < num_blocks:
                return True
        return False


def _num_computed(seq: Sequence) -> int:
    return seq.num_computed
