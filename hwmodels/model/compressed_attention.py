"""Attention over a window of tokens and over groups of tokens that are compressed to one entry each.

DeepSeek-V4 (2026), section 2.3. All heads attend to one vector per entry, which is key and value at once, as
in multi-query attention. A layer keeps, for a ratio r of tokens per entry:

    r = 0     the last tokens within the window                               sliding attention
    r = 4     one entry for r tokens, of which an indexer selects the top k   compressed sparse attention
    r = 128   one entry for r tokens, all of which are attended to            heavily compressed attention

Entries of the last two grow with the context; the window and the compressor's unfinished group do not. 61
layers of DeepSeek-V4-Pro in bf16 (30 with r = 4, 31 with 128) take 9 kB per token, DeepSeek-V3.2's 76 kB.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from fieldlimits import NonNegativeInt, PositiveInt, check
from hwmodels.model.attention import Attention, check_indexer, kept_heads
from hwmodels.model.matrices import Matrix, Role, share_of
from hwmodels.model.quantization import KV_BYTES, KV_SCALE_BYTES

OVERLAP = 2
"""Series of keys and values of the compressor whose groups overlap: that of layers with an indexer."""

FP8_SCALE_BYTES = 8.0
"""Scales of an entry in fp8, one for 64 elements, with its padding; the part with position stays in bf16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedAttention(Attention):
    """A layer of DeepSeek-V4: low-rank queries, one shared key and value, output in groups of low rank.

    It has no window: what grows with the context is kept whole, and the window itself is a state.
    """

    kv_is_latent = True
    num_kv_heads = 1

    num_heads: PositiveInt
    head_dim: PositiveInt
    """Width of an entry, and of each head."""
    rope_head_dim: PositiveInt
    """Part of the width that has a position."""
    q_lora_rank: PositiveInt
    o_groups: PositiveInt
    """Groups of heads whose outputs are projected to o_lora_rank numbers each."""
    o_lora_rank: PositiveInt
    window_tokens: PositiveInt
    """Uncompressed tokens that are attended to."""
    ratio: NonNegativeInt = 0
    """Tokens per compressed entry; 0: there are none."""
    sparse_top_k: int | None = None
    """Largest number of compressed entries that a query attends to; None: all."""
    index_n_heads: int = 0
    index_head_dim: int = 0
    num_streams: PositiveInt = 1
    """Residual streams that hyper-connections mix before and after attention and MLP (hc_mult)."""

    def __post_init__(self) -> None:
        check(self)
        if self.num_heads % self.o_groups:
            raise ValueError(f"o_groups={self.o_groups}: must divide num_heads={self.num_heads}")
        check_indexer(self.sparse_top_k, self.index_n_heads, self.index_head_dim)

    @property
    def num_query_heads(self) -> int:
        return self.num_heads

    @property
    def max_tensor_parallel_size(self) -> int:
        return self.o_groups

    def divides(self, tensor_parallel_size: int) -> bool:
        return tensor_parallel_size >= 1 and self.num_heads % tensor_parallel_size == 0

    @property
    def num_series(self) -> int:
        """Series of the compressor; with an indexer, neighbouring groups overlap."""
        return 1 if self.sparse_top_k is None else OVERLAP

    def matrices(self, hidden_size: int, tensor_parallel_size: int = 1) -> tuple[Matrix, ...]:
        """Returns one rank's matrices: down-projections, compressor and indexer are replicated."""
        heads = share_of(self.num_heads, tensor_parallel_size)
        groups = share_of(self.o_groups, tensor_parallel_size)
        group_width = self.num_heads // self.o_groups * self.head_dim
        return (
            Matrix("qkv_a_proj", hidden_size, self.q_lora_rank + self.head_dim),
            Matrix("q_b_proj", self.q_lora_rank, heads * self.head_dim),
            *self._compressor(hidden_size),
            *self._hyper_connections(hidden_size),
            Matrix("o_a_proj", group_width, groups * self.o_lora_rank),  # one batched product
            Matrix("o_b_proj", groups * self.o_lora_rank, hidden_size),
        )

    def _compressor(self, hidden_size: int) -> tuple[Matrix, ...]:
        """Returns the keys and gates of each series, and those and the queries of the indexer."""
        if not self.ratio:
            return ()
        entries = Matrix("compressor_proj", hidden_size, 2 * self.num_series * self.head_dim)
        if self.sparse_top_k is None:
            return (entries,)
        return (
            entries,
            Matrix("index_compressor_proj", hidden_size, 2 * self.num_series * self.index_head_dim),
            Matrix("index_q_proj", self.q_lora_rank, self.index_n_heads * self.index_head_dim),
            Matrix("index_weights_proj", hidden_size, self.index_n_heads, role=Role.plain),
        )

    def _hyper_connections(self, hidden_size: int) -> tuple[Matrix, ...]:
        """Returns the two projections of n streams to the n (2 + n) weights with which they are mixed."""
        n = self.num_streams
        if n == 1:
            return ()
        return (Matrix("hyper_connection", n * hidden_size, n * (2 + n), count=2, role=Role.plain),)

    def vector_elements(self, hidden_size: int) -> int:
        """Returns the elements of norms, sinks and the compressors' position biases."""
        norms = self.q_lora_rank + self.head_dim + self.num_heads
        if not self.ratio:
            return norms
        biases = self.ratio * self.num_series * (self.head_dim + self.index_head_dim)
        return norms + self.head_dim + self.index_head_dim + biases

    def entry_bytes(self, kv_dtype: str) -> float:
        """Returns the bytes of one cached vector; in fp8, the part with position is in bf16."""
        if kv_dtype == "fp8":
            return self.head_dim - self.rope_head_dim + 2.0 * self.rope_head_dim + FP8_SCALE_BYTES
        return self.head_dim * KV_BYTES[kv_dtype] + KV_SCALE_BYTES.get(kv_dtype, 0.0)

    @property
    def index_entry_bytes(self) -> float:
        """Bytes of the indexer's key of an entry: fp8 with a scale; 0 without an indexer."""
        return 0.0 if self.sparse_top_k is None else self.index_head_dim + 4.0

    def kv_bytes_per_token(self, kv_dtype: str, tensor_parallel_size: int = 1) -> float:
        """Returns the bytes of an entry and its index key over the ratio, the same on every rank."""
        return (self.entry_bytes(kv_dtype) + self.index_entry_bytes) / self.ratio if self.ratio else 0.0

    def state_bytes(self, dtype: str, tensor_parallel_size: int = 1) -> float:
        """Returns the bytes of the window, and of the unfinished groups of the compressors in fp32."""
        groups = 2 * self.ratio * self.num_series * (self.head_dim + self.index_head_dim)
        return self.window_tokens * self.entry_bytes(dtype) + groups * KV_BYTES["fp32"]

    def with_fewer_heads(self, share: float) -> Self:
        """Returns the pruned layer; heads are removed in whole groups."""
        groups = kept_heads(self.o_groups, share)
        return replace(self, o_groups=groups, num_heads=self.num_heads // self.o_groups * groups)
