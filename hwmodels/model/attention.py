"""Kinds of attention: their matrices, what they keep of a token or a sequence, how they are cut.

A new kind is a class here, its operators in `hwmodels.assembly.attention`, and in `hwmodels.hf.architectures`
the fields of a config.json that say that a layer has it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, Self

from hwmodels.checks import check_whole
from hwmodels.model.matrices import Matrix, Role, share_of
from hwmodels.model.quantization import KV_BYTES, KV_SCALE_BYTES


class Attention(Protocol):
    """What a kind of attention says of one layer; a rank is one of tensor_parallel_size."""

    @property
    def window(self) -> int | None:
        """Tokens of a sequence that are kept and attended to; None: all."""

    @property
    def num_query_heads(self) -> int:
        """Heads whose outputs are concatenated."""

    @property
    def num_kv_heads(self) -> int:
        """Heads with keys and values of their own in the cache."""

    @property
    def kv_is_latent(self) -> bool:
        """Whether all heads attend to one cached vector of a token, which every rank keeps."""

    @property
    def max_tensor_parallel_size(self) -> int: ...

    @property
    def cutting_rule(self) -> str:
        """What a tensor_parallel_size must do, for a message: divide the 32 attention heads."""

    def divides(self, tensor_parallel_size: int) -> bool:
        """Whether the heads can be shared out evenly."""

    def matrices(self, hidden_size: int, tensor_parallel_size: int = 1) -> tuple[Matrix, ...]:
        """Of one rank."""

    def vector_elements(self, hidden_size: int) -> int:
        """Biases, norms and other vectors; every rank holds them all."""

    def kv_bytes_per_token(self, kv_dtype: str, tensor_parallel_size: int = 1) -> float:
        """Kept of each token on one rank."""

    def state_bytes(self, dtype: str, tensor_parallel_size: int = 1) -> float:
        """Kept of a sequence of any length on one rank."""

    def least_pair_flops(self, tensor_parallel_size: int = 1) -> float:
        """What no kernel can do without for a query and a key on one rank; 0 where nothing is known of it."""

    def with_fewer_heads(self, share: float) -> Self:
        """Pruned to that share of the heads, whole groups of them."""


def kept_heads(num_heads: int, share: float) -> int:
    return max(1, round(num_heads * share))


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedQueryAttention:
    """Softmax attention: multi-head (num_kv_heads = num_heads), grouped-query, or multi-query (1)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    """Q, K and V projections have biases (Qwen2)."""
    o_bias: bool = False
    """The output projection has a bias (gpt-oss)."""
    qk_norm: bool = False
    """Queries and keys are RMS-normalised (Qwen3); weights counted: head_dim for each of the two."""
    window: int | None = None
    """Attention reaches this many tokens back (Mistral, Gemma, gpt-oss), its own included; None: all."""
    shares_kv: bool = False
    """Attends to the keys and values of an earlier layer: no K and V of its own, none cached (Gemma 3n)."""
    output_gate: bool = False
    """The Q projection also makes a gate on the output, so it is twice as wide (Qwen3-Next)."""
    sinks: bool = False
    """One learned logit a head in the softmax's denominator (gpt-oss)."""

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            check_whole(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            divisors = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            nearest = min(divisors, key=lambda n: abs(n - self.num_kv_heads))
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads}: must divide num_heads={self.num_heads}; "
                f"nearest: {nearest}"
            )
        if self.window is not None:
            check_whole("window", self.window, remedy=", or null")

    @property
    def num_query_heads(self) -> int:
        return self.num_heads

    @property
    def kv_is_latent(self) -> bool:
        return False

    @property
    def max_tensor_parallel_size(self) -> int:
        return self.num_heads

    @property
    def cutting_rule(self) -> str:
        return (
            f"divide the {self.num_heads} attention heads, and divide or be a multiple of "
            f"the {self.num_kv_heads} KV heads"
        )

    def divides(self, tensor_parallel_size: int) -> bool:
        """Whether heads can be shared out evenly; KV heads are copied where there are fewer than ranks."""
        size, kv = tensor_parallel_size, self.num_kv_heads
        return size >= 1 and self.num_heads % size == 0 and (kv % size == 0 or size % kv == 0)

    def kv_heads_per_rank(self, tensor_parallel_size: int) -> int:
        return max(1, self.num_kv_heads // tensor_parallel_size)

    def matrices(self, hidden_size: int, tensor_parallel_size: int = 1) -> tuple[Matrix, ...]:
        q_width = share_of(self.num_heads, tensor_parallel_size) * self.head_dim
        kv_heads = 0 if self.shares_kv else self.kv_heads_per_rank(tensor_parallel_size)
        qkv_width = (2 if self.output_gate else 1) * q_width + 2 * kv_heads * self.head_dim
        return (Matrix("qkv_proj", hidden_size, qkv_width), Matrix("o_proj", q_width, hidden_size))

    def vector_elements(self, hidden_size: int) -> int:
        """Biases, norms over heads and sinks."""
        (qkv, _) = self.matrices(hidden_size)
        norms = self.head_dim * (1 if self.shares_kv else 2)
        return (
            self.qkv_bias * qkv.n
            + self.o_bias * hidden_size
            + self.qk_norm * norms
            + self.sinks * self.num_heads
        )

    def kv_bytes_per_token(self, kv_dtype: str, tensor_parallel_size: int = 1) -> float:
        """2 (K, V) x KV heads x (head_dim x element bytes + scale bytes) of one layer on one rank."""
        if self.shares_kv:
            return 0.0
        head_bytes = self.head_dim * KV_BYTES[kv_dtype] + KV_SCALE_BYTES.get(kv_dtype, 0.0)
        return 2 * self.kv_heads_per_rank(tensor_parallel_size) * head_bytes

    def state_bytes(self, dtype: str, tensor_parallel_size: int = 1) -> float:
        return 0.0

    def least_pair_flops(self, tensor_parallel_size: int = 1) -> float:
        """4 heads head_dim."""
        return 4 * share_of(self.num_heads, tensor_parallel_size) * self.head_dim

    def with_fewer_heads(self, share: float) -> Self:
        """Queries go with their KV head."""
        kv_heads = kept_heads(self.num_kv_heads, share)
        group = self.num_heads // self.num_kv_heads
        return replace(self, num_heads=kv_heads * group, num_kv_heads=kv_heads)


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """Multi-head latent attention: keys and values of all heads come from one cached vector a token.

    DeepSeek-V2 (2024), section 2.1. With sparse_top_k an indexer picks the tokens that a query attends to:
    DeepSeek sparse attention (DeepSeek-V3.2, GLM-5).
    """

    num_heads: int
    q_lora_rank: int | None = None
    """Width of the compressed query; None: queries are projected at once (DeepSeek-V2-Lite)."""
    kv_lora_rank: int
    """Width of the compressed keys and values."""
    qk_nope_head_dim: int
    """Of a head's query and key: the part without position."""
    qk_rope_head_dim: int
    """The part with position, whose key all heads share."""
    v_head_dim: int
    sparse_top_k: int | None = None
    """At most so many tokens are attended to; None: all."""
    index_n_heads: int = 0
    index_head_dim: int = 0

    def __post_init__(self) -> None:
        for name in ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            check_whole(name, getattr(self, name))
        if self.q_lora_rank is not None:
            check_whole("q_lora_rank", self.q_lora_rank, remedy=", or null")
        if self.sparse_top_k is None:
            return
        check_whole("sparse_top_k", self.sparse_top_k, remedy=", or null")
        if self.q_lora_rank is None:
            raise ValueError(
                f"sparse_top_k={self.sparse_top_k}: the indexer reads the compressed query; give q_lora_rank"
            )
        check_whole("index_n_heads", self.index_n_heads, remedy=" where sparse_top_k is given")
        check_whole("index_head_dim", self.index_head_dim, remedy=" where sparse_top_k is given")

    @property
    def window(self) -> None:
        """No token's latent vector is ever dropped, with the indexer neither."""
        return None

    @property
    def num_query_heads(self) -> int:
        return self.num_heads

    @property
    def num_kv_heads(self) -> int:
        return 1

    @property
    def kv_is_latent(self) -> bool:
        return True

    @property
    def max_tensor_parallel_size(self) -> int:
        return self.num_heads

    @property
    def cutting_rule(self) -> str:
        return f"divide the {self.num_heads} attention heads"

    @property
    def latent_width(self) -> int:
        """Elements cached for a token: 512 + 64 in DeepSeek-V2 and V3."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def divides(self, tensor_parallel_size: int) -> bool:
        return tensor_parallel_size >= 1 and self.num_heads % tensor_parallel_size == 0

    def matrices(self, hidden_size: int, tensor_parallel_size: int = 1) -> tuple[Matrix, ...]:
        """The down-projections are copied on every rank; kv_b_proj is what absorbed decoding folds away."""
        heads = share_of(self.num_heads, tensor_parallel_size)
        q_width = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        if self.q_lora_rank is None:
            queries = [
                Matrix("q_proj", hidden_size, q_width),
                Matrix("kv_a_proj", hidden_size, self.latent_width),
            ]
        else:
            queries = [
                Matrix("qkv_a_proj", hidden_size, self.q_lora_rank + self.latent_width),
                Matrix("q_b_proj", self.q_lora_rank, q_width),
            ]
        return (
            *queries,
            Matrix("kv_b_proj", self.kv_lora_rank, heads * (self.qk_nope_head_dim + self.v_head_dim)),
            Matrix("o_proj", heads * self.v_head_dim, hidden_size),
            *self._indexer(hidden_size),
        )

    def _indexer(self, hidden_size: int) -> tuple[Matrix, ...]:
        """Copied on every rank: each needs the whole choice of tokens."""
        if self.sparse_top_k is None or self.q_lora_rank is None:
            return ()
        return (
            Matrix("index_q_proj", self.q_lora_rank, self.index_n_heads * self.index_head_dim),
            Matrix("index_k_proj", hidden_size, self.index_head_dim),
            Matrix("index_weights_proj", hidden_size, self.index_n_heads, role=Role.plain),
        )

    def vector_elements(self, hidden_size: int) -> int:
        """Norms of the compressed queries and keys; weight and bias of the index keys' layer norm."""
        norms = self.kv_lora_rank + (self.q_lora_rank or 0)
        return norms + (2 * self.index_head_dim if self.sparse_top_k else 0)

    def kv_bytes_per_token(self, kv_dtype: str, tensor_parallel_size: int = 1) -> float:
        """(kv_lora_rank + qk_rope_head_dim) x element bytes of one layer, the same on every rank.

        With an indexer also one key in fp8 and its fp32 scale.
        """
        latent = self.latent_width * KV_BYTES[kv_dtype] + KV_SCALE_BYTES.get(kv_dtype, 0.0)
        return latent + (self.index_head_dim + 4.0 if self.sparse_top_k else 0.0)

    def state_bytes(self, dtype: str, tensor_parallel_size: int = 1) -> float:
        return 0.0

    def least_pair_flops(self, tensor_parallel_size: int = 1) -> float:
        """Absorbed or expanded attention, of all tokens or of a few: kernels differ too much for a limit."""
        return 0.0

    def with_fewer_heads(self, share: float) -> Self:
        return replace(self, num_heads=kept_heads(self.num_heads, share))


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearAttention:
    """Gated delta net: a matrix of constant size a head instead of KV (Yang et al., 2024; Qwen3-Next)."""

    num_key_heads: int
    key_head_dim: int
    num_value_heads: int
    value_head_dim: int
    conv_kernel: int = 4
    """Tokens that the short convolution over Q, K and V looks at."""
    state_dtype: str = "fp32"
    """Of the recurrent state (`KV_BYTES`); fp32 in the published implementation."""

    def __post_init__(self) -> None:
        for name in ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim", "conv_kernel"):
            check_whole(name, getattr(self, name))
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"num_key_heads={self.num_key_heads}: must divide num_value_heads={self.num_value_heads}"
            )
        if self.state_dtype not in ("fp32", "bf16", "fp16"):
            raise ValueError(f"state_dtype={self.state_dtype}: must be fp32, bf16 or fp16")

    @property
    def window(self) -> None:
        return None

    @property
    def num_query_heads(self) -> int:
        return self.num_value_heads

    @property
    def num_kv_heads(self) -> int:
        """Nothing is cached; 1 is the least that can be said."""
        return 1

    @property
    def kv_is_latent(self) -> bool:
        return False

    @property
    def max_tensor_parallel_size(self) -> int:
        return self.num_key_heads

    @property
    def cutting_rule(self) -> str:
        return f"divide the {self.num_key_heads} key heads of the linear attention"

    def divides(self, tensor_parallel_size: int) -> bool:
        return tensor_parallel_size >= 1 and self.num_key_heads % tensor_parallel_size == 0

    def key_width(self, tensor_parallel_size: int = 1) -> int:
        return share_of(self.num_key_heads, tensor_parallel_size) * self.key_head_dim

    def value_heads_per_rank(self, tensor_parallel_size: int = 1) -> int:
        return share_of(self.num_value_heads, tensor_parallel_size)

    def value_width(self, tensor_parallel_size: int = 1) -> int:
        return self.value_heads_per_rank(tensor_parallel_size) * self.value_head_dim

    def conv_width(self, tensor_parallel_size: int = 1) -> int:
        """Channels of the convolution: Q, K and V."""
        return 2 * self.key_width(tensor_parallel_size) + self.value_width(tensor_parallel_size)

    def matrices(self, hidden_size: int, tensor_parallel_size: int = 1) -> tuple[Matrix, ...]:
        """Q, K, V and the output gate z; the decay and write gates b, a of each value head; the output."""
        values = self.value_width(tensor_parallel_size)
        gates = 2 * self.value_heads_per_rank(tensor_parallel_size)
        return (
            Matrix("in_proj_qkvz", hidden_size, self.conv_width(tensor_parallel_size) + values),
            Matrix("in_proj_ba", hidden_size, gates, role=Role.plain),
            Matrix("out_proj", values, hidden_size),
        )

    def vector_elements(self, hidden_size: int) -> int:
        """Convolution, decay and step of each value head, norm of the output."""
        return self.conv_width() * self.conv_kernel + 2 * self.num_value_heads + self.value_head_dim

    def kv_bytes_per_token(self, kv_dtype: str, tensor_parallel_size: int = 1) -> float:
        return 0.0

    def state_bytes(self, dtype: str, tensor_parallel_size: int = 1) -> float:
        """Of one sequence in one layer on one rank: value heads x key_head_dim x value_head_dim, and the
        last conv_kernel - 1 inputs of the convolution, which are kept in the model's dtype."""
        heads = self.value_heads_per_rank(tensor_parallel_size)
        recurrent = heads * self.key_head_dim * self.value_head_dim * KV_BYTES[self.state_dtype]
        return recurrent + self.conv_width(tensor_parallel_size) * (self.conv_kernel - 1) * KV_BYTES[dtype]

    def least_pair_flops(self, tensor_parallel_size: int = 1) -> float:
        return 0.0

    def with_fewer_heads(self, share: float) -> Self:
        """Values go with their key head."""
        key_heads = kept_heads(self.num_key_heads, share)
        group = self.num_value_heads // self.num_key_heads
        return replace(self, num_key_heads=key_heads, num_value_heads=key_heads * group)
