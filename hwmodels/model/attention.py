"""Kinds of softmax attention: their matrices, their caches per token, and their sharding.

Layers with a state of constant size are in `hwmodels.model.recurrent`. A new kind is a subclass of
`Attention`, its operators in `hwmodels.assembly.attention`, and in `hwmodels.hf.architectures`
the fields of a config.json by which it is recognised.

`CompressedAttention` attends to a window of tokens and to groups of tokens compressed to one entry each
(DeepSeek-V4, 2026, section 2.3). All heads attend to one vector per entry, which is both key and value, as in
multi-query attention. A layer keeps, for a ratio r of tokens per entry:

    r = 0     the last tokens within the window                               sliding attention
    r = 4     one entry for r tokens, of which an indexer selects the top k   compressed sparse attention
    r = 128   one entry for r tokens, all of which are attended to            heavily compressed attention

Entries of the last two grow with the context; the window and the compressor's unfinished group do not. 61
layers of DeepSeek-V4-Pro in bf16 (30 with r = 4, 31 with 128) take 9 kB per token, DeepSeek-V3.2's 76 kB.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

from fieldlimits import Checked, NonNegativeInt, PositiveInt, check
from hwmodels.checks import check_whole
from hwmodels.model.weights import KV_BYTES, KV_SCALE_BYTES, Matrix, Role, share_of


class Attention(Checked, ABC):
    """A kind of attention in one layer; a rank is one of tensor_parallel_size.

    Defaults are those of layers that cache nothing and cannot be pruned.
    """

    __slots__ = ()

    window: int | None = None
    """Tokens of a sequence that are kept and attended to; None: the whole sequence."""
    num_kv_heads: int
    """Number of heads with separate keys and values in the cache; 1 if there are none."""
    kv_is_latent: bool = False
    """True if all heads attend to one cached vector per token, which every rank keeps."""

    @property
    @abstractmethod
    def num_query_heads(self) -> int:
        """Returns the number of heads; their outputs are concatenated."""

    @property
    def max_tensor_parallel_size(self) -> int:
        return self.num_query_heads

    @property
    def cutting_rule(self) -> str:
        """Rule for valid values of tensor_parallel_size, for error messages."""
        return f"divide the {self.num_query_heads} attention heads"

    def divides(self, tensor_parallel_size: int) -> bool:
        """Returns whether the heads divide evenly over the ranks."""
        return tensor_parallel_size >= 1 and self.max_tensor_parallel_size % tensor_parallel_size == 0

    @abstractmethod
    def matrices(self, hidden_size: int, tensor_parallel_size: int = 1) -> tuple[Matrix, ...]:
        """Returns the weight matrices of one rank."""

    @abstractmethod
    def vector_elements(self, hidden_size: int) -> int:
        """Returns the elements of biases, norms and other vectors, which every rank holds completely."""

    def kv_bytes_per_token(self, kv_dtype: str, tensor_parallel_size: int = 1) -> float:
        """Returns the KV bytes per token on one rank."""
        return 0.0

    def state_bytes(self, dtype: str, tensor_parallel_size: int = 1) -> float:
        """Returns the state bytes of a sequence of any length on one rank."""
        return 0.0

    def least_pair_flops(self, tensor_parallel_size: int = 1) -> float:
        """Returns a lower bound of FLOPs per query and key on one rank, for any kernel; 0: unknown."""
        return 0.0

    def with_fewer_heads(self, share: float) -> Self:
        """Returns the layer pruned to this share of its heads, in whole groups.

        Raises ValueError for kinds whose heads cannot be pruned.
        """
        raise ValueError(f"heads={share}: {type(self).__name__} layers cannot be pruned by heads; must be 1")


def check_indexer(top_k: int | None, num_heads: int, head_dim: int) -> None:
    """Raises ValueError unless an indexer that selects top_k tokens has heads; None: no indexer."""
    if top_k is None:
        return
    check_whole("sparse_top_k", top_k, remedy=", or null")
    check_whole("index_n_heads", num_heads, remedy=" where sparse_top_k is given")
    check_whole("index_head_dim", head_dim, remedy=" where sparse_top_k is given")


def kept_heads(num_heads: int, share: float) -> int:
    """Returns the number of heads that pruning to a share keeps, at least 1."""
    return max(1, round(num_heads * share))


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedQueryAttention(Attention):
    """Softmax attention: multi-head (num_kv_heads = num_heads), grouped-query, or multi-query (1)."""

    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    v_head_dim: PositiveInt | None = None
    """Width of a head's values (MiMo-V2: 128, keys 192); None: the width of its keys."""
    qkv_bias: bool = False
    """Biases on the Q, K and V projections (Qwen2)."""
    o_bias: bool = False
    """Bias on the output projection (gpt-oss)."""
    qk_norm: bool = False
    """RMS norm of queries and keys (Qwen3), each with head_dim weights."""
    qk_norm_joins_heads: bool = False
    """Norm over the vectors of all heads together (MiniMax-M2): ranks sum their squares."""
    window: PositiveInt | None = None
    """Number of tokens that attention reaches back, including its own (Mistral, Gemma, gpt-oss); None: all.
    """
    window_is_chunk: bool = False
    """Whether the window is a chunk of the sequence, to whose first token attention reaches back (Llama 4).

    Without a window it is not used.
    """
    shares_kv: bool = False
    """Reuse of an earlier layer's keys and values: no K and V projections, no cache (Gemma 3n)."""
    output_gate: bool = False
    """Gate on the output, made by the Q projection, which is then twice as wide (Qwen3-Next)."""
    head_gate: bool = False
    """Gate of one number per head on the output, from the hidden state (Step-3.5)."""
    sinks: bool = False
    """One learned logit per head in the denominator of the softmax (gpt-oss)."""
    sparse_top_k: int | None = None
    """Maximum number of tokens that a query attends to, selected by an indexer (MiniMax-M3); None: all."""
    index_n_heads: int = 0
    index_head_dim: int = 0

    def __post_init__(self) -> None:
        check(self)
        check_indexer(self.sparse_top_k, self.index_n_heads, self.index_head_dim)
        if self.num_heads % self.num_kv_heads:
            divisors = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            nearest = min(divisors, key=lambda n: abs(n - self.num_kv_heads))
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads}: must divide num_heads={self.num_heads}; "
                f"nearest: {nearest}"
            )

    @property
    def num_query_heads(self) -> int:
        return self.num_heads

    @property
    def cutting_rule(self) -> str:
        return (
            f"divide the {self.num_heads} attention heads, and divide or be a multiple of "
            f"the {self.num_kv_heads} KV heads"
        )

    def divides(self, tensor_parallel_size: int) -> bool:
        """Returns whether heads divide evenly; KV heads are replicated if there are fewer than ranks."""
        size, kv = tensor_parallel_size, self.num_kv_heads
        return size >= 1 and self.num_heads % size == 0 and (kv % size == 0 or size % kv == 0)

    def kv_heads_per_rank(self, tensor_parallel_size: int) -> int:
        return max(1, self.num_kv_heads // tensor_parallel_size)

    @property
    def value_dim(self) -> int:
        """Width of a head's values."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    def matrices(self, hidden_size: int, tensor_parallel_size: int = 1) -> tuple[Matrix, ...]:
        """Returns one rank's matrices: queries, keys and values; output; head gate and indexer, if any."""
        heads = share_of(self.num_heads, tensor_parallel_size)
        kv_heads = 0 if self.shares_kv else self.kv_heads_per_rank(tensor_parallel_size)
        q_width = (2 if self.output_gate else 1) * heads * self.head_dim
        kv_widths = (kv_heads * self.head_dim, kv_heads * self.value_dim) if kv_heads else ()
        slices = (q_width, *kv_widths)
        return (
            Matrix("qkv_proj", hidden_size, sum(slices), slices=slices),
            Matrix("o_proj", heads * self.value_dim, hidden_size),
            *((Matrix("head_gate", hidden_size, heads),) if self.head_gate else ()),
            *self._indexer(hidden_size),
        )

    def _indexer(self, hidden_size: int) -> tuple[Matrix, ...]:
        """Returns the matrix of the indexer's queries and key, replicated on every rank."""
        if self.sparse_top_k is None:
            return ()
        return (Matrix("index_qk_proj", hidden_size, (self.index_n_heads + 1) * self.index_head_dim),)

    def vector_elements(self, hidden_size: int) -> int:
        """Returns the elements of biases, norms over heads, and sinks."""
        qkv, *_ = self.matrices(hidden_size)
        norms = self.head_dim * (1 if self.shares_kv else 2)
        return (
            self.qkv_bias * qkv.n
            + self.o_bias * hidden_size
            + self.qk_norm * norms
            + self.sinks * self.num_heads
        )

    def kv_bytes_per_token(self, kv_dtype: str, tensor_parallel_size: int = 1) -> float:
        """Returns KV heads of the rank x (key and value elements x element bytes + scale bytes of both).

        With an indexer, one key in the same format is added.
        """
        if self.shares_kv:
            return 0.0
        element_bytes, scale_bytes = KV_BYTES[kv_dtype], KV_SCALE_BYTES.get(kv_dtype, 0.0)
        head_bytes = (self.head_dim + self.value_dim) * element_bytes + 2 * scale_bytes
        return self.kv_heads_per_rank(tensor_parallel_size) * head_bytes + self.index_key_bytes(kv_dtype)

    def index_key_bytes(self, kv_dtype: str) -> float:
        """Returns the bytes of the indexer's key of a token; 0 without an indexer."""
        return 0.0 if self.sparse_top_k is None else self.index_head_dim * KV_BYTES[kv_dtype]

    def least_pair_flops(self, tensor_parallel_size: int = 1) -> float:
        """Returns 2 heads (key and value width), the FLOPs per query and key; 0 with an indexer."""
        if self.sparse_top_k is not None:
            return 0.0
        return 2 * share_of(self.num_heads, tensor_parallel_size) * (self.head_dim + self.value_dim)

    def with_fewer_heads(self, share: float) -> Self:
        """Returns the pruned layer; query heads are removed together with their KV head."""
        kv_heads = kept_heads(self.num_kv_heads, share)
        group = self.num_heads // self.num_kv_heads
        return replace(self, num_heads=kv_heads * group, num_kv_heads=kv_heads)


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention(Attention):
    """Multi-head latent attention: keys and values of all heads come from one cached vector per token.

    DeepSeek-V2 (2024), section 2.1. With sparse_top_k an indexer selects the tokens that a query attends to:
    DeepSeek sparse attention (DeepSeek-V3.2, GLM-5). The latent vectors of all tokens are still kept. FLOPs
    of absorbed and expanded, full and sparse attention differ too much for a common lower bound.
    """

    kv_is_latent = True
    num_kv_heads = 1

    num_heads: PositiveInt
    q_lora_rank: PositiveInt | None = None
    """Width of the compressed query; None: queries are projected directly (DeepSeek-V2-Lite)."""
    kv_lora_rank: PositiveInt
    """Width of the compressed keys and values."""
    qk_nope_head_dim: PositiveInt
    """Width of the part of each head's query and key without position."""
    qk_rope_head_dim: NonNegativeInt
    """Width of the part with position, whose key all heads share; 0: no such part (GLM-5.3-Flash)."""
    v_head_dim: PositiveInt
    window: PositiveInt | None = None
    """Number of tokens that attention reaches back, including its own (dots3); None: all."""
    shares_kv: bool = False
    """Reuse of an earlier layer's latent vectors: no projection to them, no cache (Mistral Large 4)."""
    output_gate: bool = False
    """Gate on the heads' outputs, a projection of the hidden state (Kimi-K3)."""
    head_gate: bool = False
    """Gate of one number per head on the output, from the hidden state (dots3)."""
    query_gate: bool = False
    """Gate on the heads' outputs, computed together with the queries from their low rank, which doubles the
    width (A.X K2).
    """
    sparse_top_k: int | None = None
    """Maximum number of tokens that a query attends to; None: no limit."""
    index_n_heads: int = 0
    index_head_dim: int = 0
    shares_index: bool = False
    """Reuse of the tokens selected by an earlier layer's indexer (GLM-5.2): no indexer, no index keys."""
    index_ratio: PositiveInt = 1
    """Number of tokens per indexer key, which a gate pools from the tokens' keys (GLM-5.3-Flash)."""

    def __post_init__(self) -> None:
        check(self)
        check_indexer(self.sparse_top_k, self.index_n_heads, self.index_head_dim)
        if self.query_gate and self.q_lora_rank is None:
            raise ValueError("query_gate=True: is made from the compressed query; give q_lora_rank")

    @property
    def has_indexer(self) -> bool:
        """True if the layer selects tokens itself."""
        return self.sparse_top_k is not None and not self.shares_index

    @property
    def num_query_heads(self) -> int:
        return self.num_heads

    @property
    def latent_width(self) -> int:
        """Elements cached per token: 512 + 64 in DeepSeek-V2 and V3."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def made_width(self) -> int:
        """Number of elements of a token's latent vector that the layer computes itself."""
        return 0 if self.shares_kv else self.latent_width

    def matrices(self, hidden_size: int, tensor_parallel_size: int = 1) -> tuple[Matrix, ...]:
        """Returns one rank's matrices. Down-projections are replicated; absorbed decode folds kv_b_proj."""
        heads = share_of(self.num_heads, tensor_parallel_size)
        q_width = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        if self.q_lora_rank is None:
            queries = [
                Matrix("q_proj", hidden_size, q_width),
                *((Matrix("kv_a_proj", hidden_size, self.made_width),) if self.made_width else ()),
            ]
        else:
            queries = [
                Matrix("qkv_a_proj", hidden_size, self.q_lora_rank + self.made_width),
                Matrix("q_gate_proj", 2 * self.q_lora_rank, q_width + heads * self.v_head_dim)
                if self.query_gate
                else Matrix("q_b_proj", self.q_lora_rank, q_width),
            ]
        return (
            *queries,
            Matrix("kv_b_proj", self.kv_lora_rank, heads * (self.qk_nope_head_dim + self.v_head_dim)),
            *((Matrix("gate_proj", hidden_size, heads * self.v_head_dim),) if self.output_gate else ()),
            *((Matrix("head_gate", hidden_size, heads),) if self.head_gate else ()),
            Matrix("o_proj", heads * self.v_head_dim, hidden_size),
            *self._indexer(hidden_size),
        )

    def _indexer(self, hidden_size: int) -> tuple[Matrix, ...]:
        """Returns the indexer's matrices, replicated on every rank because each needs the full selection.

        Its queries are made from the compressed query or, without one, from the hidden state.
        """
        if not self.has_indexer:
            return ()
        pool = (Matrix("index_pool_gate", hidden_size, self.index_head_dim),) if self.index_ratio > 1 else ()
        return (
            Matrix("index_q_proj", self.q_lora_rank or hidden_size, self.index_n_heads * self.index_head_dim),
            Matrix("index_k_proj", hidden_size, self.index_head_dim),
            *pool,
            Matrix("index_weights_proj", hidden_size, self.index_n_heads, role=Role.plain),
        )

    def vector_elements(self, hidden_size: int) -> int:
        """Returns the elements of the norms of compressed queries and keys, and of index keys."""
        norms = (0 if self.shares_kv else self.kv_lora_rank) + (self.q_lora_rank or 0)
        return norms + (2 * self.index_head_dim if self.has_indexer else 0)

    def kv_bytes_per_token(self, kv_dtype: str, tensor_parallel_size: int = 1) -> float:
        """Returns (kv_lora_rank + qk_rope_head_dim) x element bytes, the same on every rank.

        With an indexer, one fp8 key and its fp32 scale are added, for index_ratio tokens.
        """
        latent = self.latent_width * KV_BYTES[kv_dtype] + KV_SCALE_BYTES.get(kv_dtype, 0.0)
        return (0.0 if self.shares_kv else latent) + self.index_key_bytes / self.index_ratio

    @property
    def index_key_bytes(self) -> float:
        """Bytes of a key of the indexer, in fp8 with a scale; 0 without an indexer."""
        return self.index_head_dim + 4.0 if self.has_indexer else 0.0

    def with_fewer_heads(self, share: float) -> Self:
        return replace(self, num_heads=kept_heads(self.num_heads, share))


@dataclass(frozen=True, kw_only=True, slots=True)
class NoAttention(Attention):
    """A layer without attention: only an MLP (Nemotron-H, layers omitted by DeciLM)."""

    num_query_heads = 0
    num_kv_heads = 1
    max_tensor_parallel_size = 2**20
    cutting_rule = "be at least 1"

    def divides(self, tensor_parallel_size: int) -> bool:
        return tensor_parallel_size >= 1

    def matrices(self, hidden_size: int, tensor_parallel_size: int = 1) -> tuple[Matrix, ...]:
        return ()

    def vector_elements(self, hidden_size: int) -> int:
        return 0

    def with_fewer_heads(self, share: float) -> Self:
        return self


OVERLAP = 2
"""Number of series of keys and values in a compressor with overlapping groups, for layers with an indexer."""

FP8_SCALE_BYTES = 8.0
"""Bytes of scales of an fp8 entry, one per 64 elements, with padding; the part with position stays in bf16.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedAttention(Attention):
    """A layer of DeepSeek-V4: low-rank queries, one shared key and value, output in groups of low rank.

    It has no `window`: entries that grow with the context are all kept, and the window itself is a state.
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
    """Number of tokens per compressed entry; 0: no compressed entries."""
    sparse_top_k: int | None = None
    """Maximum number of compressed entries that a query attends to; None: all."""
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
        """Returns the two projections of n streams to the n (2 + n) weights that mix them."""
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
        """Returns the bytes of an entry and its index key divided by the ratio, the same on every rank."""
        return (self.entry_bytes(kv_dtype) + self.index_entry_bytes) / self.ratio if self.ratio else 0.0

    def state_bytes(self, dtype: str, tensor_parallel_size: int = 1) -> float:
        """Returns the bytes of the window, and of the unfinished groups of the compressors in fp32."""
        groups = 2 * self.ratio * self.num_series * (self.head_dim + self.index_head_dim)
        return self.window_tokens * self.entry_bytes(dtype) + groups * KV_BYTES["fp32"]

    def with_fewer_heads(self, share: float) -> Self:
        """Returns the pruned layer; heads are removed in whole groups."""
        groups = kept_heads(self.o_groups, share)
        return replace(self, o_groups=groups, num_heads=self.num_heads // self.o_groups * groups)
