"""Caches that keep the tokens with the most attention: H2O and SnapKV.

H2O (Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models",
NeurIPS 2023): a sequence keeps heavy hitters, the tokens with the largest sums of attention weights so far,
and recent tokens; each new token replaces the non-recent token with the smallest sum. The sums grow in every
decode step and for every row of a prompt, so attention needs kernels that return its weights. Flash kernels
do not.

SnapKV (Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", NeurIPS 2024): at the end
of its prefill a prompt is cut to a budget of tokens: the observation window, its last tokens, and the tokens
to which the window attends most. Only the weights of the window's rows are needed, once; no further token is
dropped.

    H2O      |. h .. h ... h h .....|--- recent ---|new    h: heavy hitters; sums updated in every step
    SnapKV   |. v .. v ....|window|--- the whole output ---    v: chosen by the window, once

The numbers of tokens determine memory and attention time; `hwmodels.assembly.attention` prices the weights.
Three things are not simulated: the choice of kept tokens per head and layer, copies of kept KV, and the
memory of H2O's sums (4 bytes per token and KV head, 0.8 % of bf16 KV at head dimension 128). Outputs differ
from the model's. Assumes, like streaming, that the complete prompt fits while it is computed; a preempted
sequence is fully recomputed. Memory pressure: as paged. Horizon: as paged; H2O also up to the token with
which a budget is full.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fieldlimits import Ge, Lt, NonNegativeInt, PositiveInt, Unit
from policies.caching.pool import Caching, KvMemory, WeightReads
from policies.caching.streaming import LossyPool, WindowPool
from policies.core.sequence import PAGED, Growth, Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class H2o(Caching):
    """Settings of a cache of heavy hitters and recent tokens."""

    changes_outputs: ClassVar[bool] = True

    num_heavy_tokens: NonNegativeInt = 1024
    """Number of heavy hitters that are kept."""
    num_recent_tokens: PositiveInt = 1024
    """Number of last tokens that are kept, including the one being computed."""
    watermark: Annotated[float, Ge(0), Lt(1), Unit("share")] = 0.0
    """Share of all blocks that an admission must leave free while other sequences run."""

    @property
    def weight_reads(self) -> WeightReads:
        """The weights of every row, in every step."""
        return WeightReads(decode_share=1.0)

    def pool(self, memory: KvMemory) -> WindowPool:
        """Creates an empty pool."""
        num_kept = self.num_heavy_tokens + self.num_recent_tokens
        num_watermark_blocks = int(self.watermark * memory.num_blocks)
        return WindowPool(memory.num_blocks, self.block_size, num_watermark_blocks, num_kept)


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapKv(Caching):
    """Settings of a cache that compresses prompts."""

    changes_outputs: ClassVar[bool] = True

    num_kept_tokens: PositiveInt = 1024
    """Number of tokens of a prompt that are kept, including the window that selects them."""
    num_window_tokens: PositiveInt = 32
    """Number of last tokens of a prompt (the observation window) whose attention selects the other tokens."""
    watermark: Annotated[float, Ge(0), Lt(1), Unit("share")] = 0.0
    """Share of all blocks that an admission must leave free while other sequences run."""

    def __post_init__(self) -> None:
        Caching.__post_init__(self)
        if self.num_window_tokens > self.num_kept_tokens:
            raise ValueError(
                f"num_window_tokens={self.num_window_tokens}: must be at most num_kept_tokens="
                f"{self.num_kept_tokens}, because the window is kept, too; lower it or raise num_kept_tokens"
            )

    @property
    def weight_reads(self) -> WeightReads:
        """The weights of the observation window, once per prompt."""
        return WeightReads(prompt_rows=self.num_window_tokens)

    def pool(self, memory: KvMemory) -> PromptPool:
        """Creates an empty pool."""
        num_watermark_blocks = int(self.watermark * memory.num_blocks)
        return PromptPool(memory.num_blocks, self.block_size, num_watermark_blocks, self.num_kept_tokens)


class PromptPool(LossyPool):
    """A pool in which a sequence holds at most num_kept tokens of its prompt after its prefill."""

    def __init__(
        self, num_blocks: int, block_size: int, num_watermark_blocks: int = 0, num_kept: int = 1024
    ) -> None:
        super().__init__(num_blocks, block_size, num_watermark_blocks)
        self.num_kept = num_kept
        """Maximum number of prompt tokens in the KV cache of a decoding sequence."""

    def growth(self, seq: Sequence) -> Growth | None:
        """Drops tokens of the prompt beyond num_kept; afterwards the KV grows by blocks."""
        num_surplus = seq.num_prompt_tokens - self.num_kept
        if num_surplus > 0 and not seq.num_dropped:
            self.drop(seq, num_surplus)
        return PAGED
