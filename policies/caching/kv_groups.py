"""KV groups of models with windows: a block table per group of layers (vLLM's hybrid KV cache manager).

Layers with full attention need the KV of all tokens, layers with a sliding window only that of the last ones.
All groups have the same number of layers, so that a block of any group has the same bytes and all groups take
their blocks from one pool. A sequence needs a block in every group for block_size tokens, and a group with a
window frees the blocks that its attention does not reach any more:

    block           0    1    2    3    4    5
    full           |////|////|////|////|////|//  |      / = KV of a token
    window         |    |    |    |////|////|//  |      blocks 0 to 2 are free again
                                    ^--------^ the window of the next token begins in block 3

The rules are those of vLLM 0.32 and 0.33 (`vllm/v1/core/single_type_kv_cache_manager.py`): blocks outside of
a window are freed when the scheduler next gives the sequence tokens. With asynchronous scheduling the tokens
of the step in flight do not count, as its attention still reads the blocks, so they are freed one step later
(`KVCacheManager.allocate_slots`, num_in_flight_tokens). vLLM's padding layers, if a kind of layers does not
fill its last group, take memory here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple


class KvGroup(NamedTuple):
    """The layers that share a block table."""

    num_layers: int = 1
    """Number of layers, padding layers included; equal for all groups of a model."""
    window: int | None = None
    """Tokens that attention reaches back, its own included; None: all."""
    is_chunked: bool = False
    """Whether `window` is the length of chunks, and attention reaches back to the start of its chunk."""

    def num_skipped(self, num_computed: int) -> int:
        """Returns the number of first tokens that the token after num_computed ones does not attend to."""
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
        """Returns the most blocks that a sequence holds if at most so many of its tokens are in flight.

        Window of 1,024, steps of 2,048, blocks of 16: (1,023 + 2,048) / 16 = 192, and one more, as the window
        may begin within a block.
        """
        if self.window is None:
            return -(-max_model_len // block_size)
        if self.is_chunked:
            return -(-min(self.window + max_in_flight_tokens, max_model_len) // block_size)
        return -(-min(self.window - 1 + max_in_flight_tokens, max_model_len) // block_size) + 1

    def longest_hit(self, is_cached: Callable[[int], bool], num_blocks: int, block_size: int) -> int:
        """Returns the number of first blocks, at most num_blocks, after which a sequence can continue.

        is_cached: whether a block of the sequence is in the cache. Full attention needs all blocks before it;
        a window those that it reaches; a chunk those from its first token on.
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
    """Divides the layers of a model into groups of equal size; those with full attention come first.

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
