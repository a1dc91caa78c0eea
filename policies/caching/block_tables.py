"""Block tables for the layer groups of a model with windows, and for the branches of one sequence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple


class KvGroup(NamedTuple):
    """The layers that share a block table.

    Layers with full attention need the KV of all tokens; layers with a sliding window need only the KV of the
    last ones. All groups have the same number of layers, so blocks of all groups have the same size and come
    from one pool. A sequence needs a block in every group for block_size tokens, and a group with a window
    frees the blocks that its attention no longer reaches:

        block           0    1    2    3    4    5
        full           |////|////|////|////|////|//  |      / = KV of a token
        window         |    |    |    |////|////|//  |      blocks 0 to 2 are free again
                                        ^--------^ the window of the next token begins in block 3

    The rules are those of vLLM 0.32 and 0.33 (`vllm/v1/core/single_type_kv_cache_manager.py`): blocks outside
    of a window are freed when the scheduler next gives the sequence tokens. With asynchronous scheduling the
    tokens of the step in flight do not count, because its attention still reads the blocks; these are freed
    one step later (`KVCacheManager.allocate_slots`, num_in_flight_tokens). If a kind of layers does not fill
    its last group, vLLM's padding layers also take memory here.
    """

    num_layers: int = 1
    """Number of layers, padding layers included; equal for all groups of a model."""
    window: int | None = None
    """Tokens that attention reaches back, its own included; None: all."""
    is_chunked: bool = False
    """Whether `window` is the length of chunks, and attention reaches back to the start of its chunk."""

    def num_skipped(self, num_computed: int) -> int:
        """Returns the number of leading tokens outside the attention of the token after num_computed ones."""
        if self.window is None:
            return 0
        if self.is_chunked:
            return num_computed // self.window * self.window
        return max(0, num_computed - self.window + 1)

    def next_skip(self, num_skipped_blocks: int, block_size: int) -> int | None:
        """Returns the computed tokens at which num_skipped_blocks + 1 blocks are skipped; None: never."""
        if self.window is None:
            return None
        num_tokens = (num_skipped_blocks + 1) * block_size
        if self.is_chunked:
            return -(-num_tokens // self.window) * self.window
        return self.window - 1 + num_tokens

    def max_blocks(self, max_in_flight_tokens: int, max_model_len: int, block_size: int) -> int:
        """Returns the maximum number of blocks of a sequence with at most this many tokens in flight.

        Window of 1,024, steps of 2,048, blocks of 16: (1,023 + 2,048) / 16 = 192, and one more, as the window
        may begin within a block.
        """
        if self.window is None:
            return -(-max_model_len // block_size)
        if self.is_chunked:
            return -(-min(self.window + max_in_flight_tokens, max_model_len) // block_size)
        return -(-min(self.window - 1 + max_in_flight_tokens, max_model_len) // block_size) + 1

    def longest_hit(self, is_cached: Callable[[int], bool], num_blocks: int, block_size: int) -> int:
        """Returns the number of leading blocks, at most num_blocks, after which a sequence can continue.

        is_cached: whether a block of the sequence is in the cache. Full attention needs all earlier blocks, a
        window the blocks that it reaches, a chunk the blocks from its first token on.
        """
        if self.window is None or self.is_chunked:
            num_hit = self.num_skipped(num_blocks * block_size) // block_size
            while num_hit < num_blocks and is_cached(num_hit):
                num_hit += 1
            return num_hit
        num_needed = max(1, -(-(self.window - 1) // block_size))
        num_found = 0  # cached blocks from `number` on, without a gap
        for number in range(num_blocks - 1, -1, -1):
            num_found = num_found + 1 if is_cached(number) else 0
            if num_found >= num_needed:
                return number + num_found
        return num_found


class KvLayerKind(NamedTuple):
    """Layers of a model that keep the same tokens."""

    num_layers: int
    window: int | None
    is_chunked: bool
    bytes_per_token: float
    """KV bytes per token of one layer."""


def kv_groups(kinds: Iterable[KvLayerKind]) -> tuple[KvGroup, ...]:
    """Divides the layers of a model into groups of equal size; groups with full attention come first.

    The size is that of the rarest kind, or of the most frequent one if it has less than 1.5 times as many
    layers. Gemma 3 27B has 10 layers with full attention and 52 with a window: a group of 10, and six groups
    with a window, of which the last has 8 padding layers. Raises ValueError for layers of unequal KV bytes.
    """
    merged: dict[tuple[int | None, bool], int] = {}
    sizes = set()
    for kind in kinds:
        rule = kind.window, kind.is_chunked
        merged[rule] = merged.get(rule, 0) + kind.num_layers
        sizes.add(kind.bytes_per_token)
    if len(sizes) != 1:
        raise ValueError(
            f"caching=kv_groups: all layers must have the same KV bytes per token, found "
            f"{', '.join(f'{size:,.0f}' for size in sorted(sizes)) or 'no KV'}; "
            "choose caching=prefix or paged"
        )
    fewest, most = min(merged.values()), max(merged.values())
    num_layers = most if most < 1.5 * fewest else fewest
    ordered = sorted(merged, key=lambda rule: rule[0] is not None)
    return tuple(
        KvGroup(num_layers, window, is_chunked)
        for window, is_chunked in ordered
        for _ in range(-(-merged[window, is_chunked] // num_layers))
    )


class Branches:
    """The branches of a sequence, which grow together by one token each.

    ends: output tokens at which each branch ends. shares: whether branches share blocks. depth: output tokens
    of each live branch; the KV of the newest is not stored yet. num_emitted: output tokens so far, summed
    over all branches that ever existed. length: stored tokens of each branch after the prompt's full blocks,
    including the rest of the prompt. trunk: numbers of the blocks that all branches share.

    The branches of one sequence: tables of KV blocks with reference counts, and copy-on-write.

    Parallel sampling, beam search and tree search share common KV (PagedAttention, Kwon et al., SOSP 2023,
    section 4.4). The full blocks of the prompt belong to the sequence; the blocks after them belong to the
    branches and are numbered here from 0:

        prompt's full blocks | trunk: blocks that all branches share | one table per branch, equal in length

    Appending writes into the last block of each table. If several tables share it, all except one first get a
    copy; at a block boundary each gets a new block. A block in no table is free. Without sharing, each branch
    has copies of all blocks, including those of the prompt, as in early engines.
    """

    __slots__ = (
        "_block_size",
        "_counts",
        "_ends",
        "_next",
        "_shares",
        "_tables",
        "copies",
        "depth",
        "ids",
        "is_swapped",
        "length",
        "num_emitted",
        "num_shared_tokens",
        "trunk",
    )

    def __init__(
        self, num_prompt_tokens: int, block_size: int, ends: SequenceOf[int], shares: bool = True
    ) -> None:
        width = len(ends)
        self._block_size = block_size
        self._shares = shares
        self.length = num_prompt_tokens % block_size if shares else num_prompt_tokens
        self.num_shared_tokens = num_prompt_tokens - self.length
        """Number of tokens in the prompt's full blocks."""
        size = -(-self.length // block_size)  # 0 or 1, if they share
        step = 0 if shares else size
        self._tables = [list(range(i * step, i * step + size)) for i in range(width)]
        self._counts = dict(Counter(number for table in self._tables for number in table))
        self._next = len(self._counts)
        self.trunk: list[int] = []
        self.copies: list[tuple[int, int]] = []
        """Copies of the last append: (source block, target block)."""
        self.ids: dict[int, int] = {}
        """Number of a block -> its physical id, as far as assigned."""
        self.is_swapped = False
        """Whether all stored KV is in host memory, so that the branches continue without a prefill."""
        self.depth = 0
        self._ends = list(ends)
        self.num_emitted = 0

    @property
    def width(self) -> int:
        """Number of live branches."""
        return len(self._tables)

    @property
    def all_ended(self) -> bool:
        """True if no branch is left; `width` still counts the branches that ended last."""
        return not self._ends

    @property
    def clock(self) -> int:
        """Tokens in the branches' own blocks; `Sequence.num_computed` is based on it while they decode."""
        rest = self.length % self._block_size
        if not rest:
            return self.num_blocks * self._block_size
        num_last = len({table[-1] for table in self._tables})
        return (self.num_blocks - num_last) * self._block_size + num_last * rest

    @property
    def num_blocks(self) -> int:
        """Number of blocks that the branches own, each counted once."""
        return len(self.trunk) + len(self._counts)

    @property
    def numbers(self) -> list[int]:
        """Numbers of the branches' own blocks, each listed once."""
        return [*self.trunk, *self._counts]

    @property
    def tables(self) -> list[list[int]]:
        """Blocks of each branch, as new lists."""
        return [self.trunk + table for table in self._tables]

    def layout(self) -> list[tuple[int, int, int, int]]:
        """Returns (number, a branch with it, position, tokens) of each block, in the order of `numbers`.

        A block comes after those with earlier positions, because the last blocks of the tables are the
        newest.
        """
        size, rest = self._block_size, self.length % self._block_size
        first = self.num_shared_tokens
        held = [(number, 0, first + size * i, size) for i, number in enumerate(self.trunk)]
        first += size * len(self.trunk)
        found: dict[int, tuple[int, int]] = {}
        for branch, table in enumerate(self._tables):
            for column, number in enumerate(table):
                found.setdefault(number, (branch, column))
        last = len(self._tables[0]) - 1
        for number in self._counts:
            branch, column = found[number]
            num_tokens = rest if rest and column == last else size
            held.append((number, branch, first + size * column, num_tokens))
        return held

    def blocks_to_append(self) -> int:
        """Counts the new blocks needed for one more token per branch."""
        if self.length % self._block_size == 0:
            return len(self._tables)
        return len(self._tables) - len({table[-1] for table in self._tables})

    def append(self) -> int:
        """Allocates one more token in each branch; returns the number of copied tokens."""
        self.copies = []
        rest = self.length % self._block_size
        counts = self._counts
        for table in self._tables:
            if not rest:
                table.append(self._new())
            elif counts[table[-1]] > 1:
                shared = table[-1]
                counts[shared] -= 1
                table[-1] = self._new()
                self.copies.append((shared, table[-1]))
        self.length += 1
        return rest * len(self.copies)

    def produce(self, parents: SequenceOf[int] | None) -> list[int]:
        """Adds a new token to each branch; returns the blocks that became free.

        parents: for each new branch, the old branch that it continues; None: each continues itself. Branches
        at their end are removed. If none is left, `all_ended` is true, and no block becomes free.
        """
        self.depth += 1
        self.num_emitted += len(self._tables)
        chosen = range(len(self._tables)) if parents is None else parents
        ends = self._ends
        kept = [parent for parent in chosen if ends[parent] > self.depth]
        self._ends = [ends[parent] for parent in kept]
        if not kept or (parents is None and len(kept) == len(self._tables)):
            return []
        return self._fork(kept)

    def check_integrity(self) -> None:
        """Asserts that the reference counts match the tables."""
        num_columns = -(-self.length // self._block_size)
        assert all(len(self.trunk) + len(table) == num_columns for table in self._tables)
        assert Counter(number for table in self._tables for number in table) == self._counts
        assert not self._counts.keys() & set(self.trunk)
        assert self.ids.keys() <= self._counts.keys() | set(self.trunk)

    def _fork(self, parents: list[int]) -> list[int]:
        """Forks new branches from old ones, which share their blocks; returns the freed blocks."""
        counts = self._counts
        if not self._shares:  # a branch that continues another gets copies
            parents = list(range(len(parents)))
        for parent, table in enumerate(self._tables):
            more = parents.count(parent) - 1
            if more:
                for number in table:
                    counts[number] += more
        tables = self._tables
        self._tables = [tables[parent].copy() for parent in parents]
        freed = [number for number, count in counts.items() if not count]
        for number in freed:
            del counts[number]
        if not self._shares:
            return freed
        first = self._tables[0]
        num_common = 0  # the last block stays in the tables, because it grows
        while num_common < len(first) - 1 and counts[first[num_common]] == len(parents):
            num_common += 1
        if num_common:
            for number in first[:num_common]:
                del counts[number]
            self.trunk += first[:num_common]
            for table in self._tables:
                del table[:num_common]
        return freed

    def _new(self) -> int:
        number = self._next
        self._next += 1
        self._counts[number] = 1
        return number
