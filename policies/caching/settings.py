"""What every KV cache is: settings that make a pool from the memory that it manages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from policies.caching.eviction.future import FutureUses
from policies.caching.pool import BlockPool


class KvMemory(NamedTuple):
    """The memory that a pool manages."""

    num_blocks: int  # on the GPU, of `block_size` tokens each
    bytes_per_token: float = 0.0  # of KV, over all layers and heads
    num_devices: int = 1  # GPUs of the replica
    max_model_len: int = 2**31  # prompt and output tokens of one sequence
    future: FutureUses | None = None  # the requests to come, for offline bounds; no engine knows them


@dataclass(frozen=True, kw_only=True, slots=True)
class Caching:
    """Settings of a cache: a policy gives `pool`, and says what is unusual about it."""

    changes_outputs: ClassVar[bool] = False
    """Whether the model's answers change: KV is dropped that attention would have read."""

    block_size: int = 16
    """Tokens in a block."""

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size={self.block_size}: must be >= 1 token")

    @property
    def needs_predictor(self) -> bool:
        """Whether it asks for `Sequence.num_predicted_tokens`."""
        return False

    @property
    def needs_future(self) -> bool:
        """Whether the requests to come must be known (`KvMemory.future`): no engine can do that."""
        return False

    @property
    def tiers_gib(self) -> tuple[float, float]:
        """Host memory and disk that it uses, a GPU."""
        return 0.0, 0.0

    def pool(self, memory: KvMemory) -> BlockPool:
        """An empty pool. Raises ValueError where settings and memory do not go together."""
        raise NotImplementedError


def check_watermark(watermark: float) -> None:
    """Raise ValueError for what no share of blocks to be left free can be."""
    if not 0 <= watermark < 1:
        raise ValueError(f"watermark={watermark}: must be >= 0 and < 1 (a share of all blocks)")
