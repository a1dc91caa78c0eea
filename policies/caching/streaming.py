"""Attention sinks and a sliding window: a sequence holds a bounded number of tokens (StreamingLLM).

Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024. The KV of the first few
tokens and of the most recent ones is kept; when the window is full, each new token replaces the oldest one
that is not a sink.

    tokens   |sinks|........ dropped ........|------ recent ------|new
    blocks   |sinks|------ recent, written as a ring buffer -------|

Positions decide which tokens are kept, so no attention weights are read and flash kernels compute attention.
Outputs differ from the model's, because attention does not see dropped tokens. Assumes that a prompt is
computed with full attention and cut afterwards, so the complete prompt must fit, and that a preempted
sequence is fully recomputed: no sequence becomes longer than the memory. Memory pressure: as paged; a
sequence with a full window takes no more blocks. Horizon: as paged, and up to the token with which the window
of a sequence is full.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fieldlimits import Ge, Lt, NonNegativeInt, PositiveInt, Unit
from policies.caching.pool import BlockPool, Caching, KvMemory
from policies.core.sequence import PAGED, Growth, Sequence

STEADY = Growth(takes_blocks=False, widens=False)
"""Growth of a sequence that drops one token for each new one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamingLlm(Caching):
    """Settings of attention sinks with a window."""

    changes_outputs: ClassVar[bool] = True

    num_sink_tokens: NonNegativeInt = 4
    """Number of leading tokens that are always kept."""
    num_recent_tokens: PositiveInt = 2044
    """Number of last tokens that are kept, including the one being computed."""
    watermark: Annotated[float, Ge(0), Lt(1), Unit("share")] = 0.0
    """Share of all blocks that an admission must leave free while other sequences run."""

    def pool(self, memory: KvMemory) -> WindowPool:
        """Creates an empty pool."""
        num_kept = self.num_sink_tokens + self.num_recent_tokens
        num_watermark_blocks = int(self.watermark * memory.num_blocks)
        return WindowPool(memory.num_blocks, self.block_size, num_watermark_blocks, num_kept)


class LossyPool(BlockPool):
    """A block pool in which sequences may drop tokens; kept tokens are moved to their first blocks."""

    can_fork: ClassVar[bool] = False

    def drop(self, seq: Sequence, num_tokens: int) -> None:
        """Drops the KV of num_tokens tokens of a sequence and frees the blocks that become empty."""
        num_held = seq.stored_computed - seq.num_dropped
        num_kept_blocks = self.blocks_for(num_held - num_tokens)
        self.num_free += self.blocks_for(num_held) - num_kept_blocks
        self._free_ids.extend(reversed(seq.block_ids[num_kept_blocks:]))
        del seq.block_ids[num_kept_blocks:]
        seq.num_dropped += num_tokens


class WindowPool(LossyPool):
    """A pool in which a sequence holds at most num_kept tokens after its prefill.

    seq.kv: whether its window is full; from then on it neither takes nor frees blocks.
    """

    def __init__(
        self, num_blocks: int, block_size: int, num_watermark_blocks: int = 0, num_kept: int = 2048
    ) -> None:
        super().__init__(num_blocks, block_size, num_watermark_blocks)
        self.num_kept = num_kept
        """Maximum number of tokens in the KV cache of a decoding sequence."""

    def admit(self, seq: Sequence, num_cached: int) -> None:
        seq.kv = False
        super().admit(seq, num_cached)

    def growth(self, seq: Sequence) -> Growth | None:
        """Returns growth by blocks until the window of the sequence is full, and no growth after that."""
        num_surplus = seq.stored_computed - seq.num_dropped - self.num_kept
        if num_surplus < 0:
            is_enough = self.num_kept >= seq.max_num_tokens - 1
            return PAGED if is_enough else Growth(until=seq.num_dropped + self.num_kept)
        if num_surplus:
            self.drop(seq, num_surplus)
        seq.kv = True
        return STEADY

    def blocks_held(self, seq: Sequence, num_tokens: int) -> int:
        """Returns the number of blocks, even if num_tokens counts a token that would replace another."""
        return self.blocks_for(self.num_kept if seq.kv else num_tokens)

    def block_ids(self, seq: Sequence, num_tokens: int) -> list[int]:
        return super().block_ids(seq, self.num_kept if seq.kv else num_tokens)
