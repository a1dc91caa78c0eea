"""Layers with a state of constant size per sequence instead of KV per token: state-space layers and others.

The module lists all kinds.

    LinearAttention     gated delta nets (Yang et al., 2024; Qwen3-Next)
    Mamba1              d_inner x d_state numbers; a scan outside the tensor cores (Gu and Dao, 2023)
    Mamba2              a matrix per head, groups of heads share B and C (SSD: Dao and Gu, 2024)
    KimiDeltaAttention  the delta rule with a decay per channel (Kimi Linear, 2025)
    LightningAttention  linear attention with a fixed decay per head (MiniMax-01, 2025)
    ShortConvolution    a gated convolution over a few tokens, without another state (LFM2, 2025)
    BesideAttention     a recurrent layer and softmax attention side by side, summed (Falcon-H1)

States are per sequence and layer; FLOPs count a multiplication and an addition as two.

`RecurrentLayer` is the common base; each kind defines its matrices, its convolution, its state and the FLOPs
of its recurrence.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

from fieldlimits import OneOf, PositiveInt, check
from hwmodels.model.attention import Attention, GroupedQueryAttention, kept_heads
from hwmodels.model.weights import KV_BYTES, Matrix, Role, share_of

SCAN_CHUNK = 64
"""Tokens that the chunked form of a recurrence processes at once (Yang et al., 2024)."""


class RecurrentLayer(Attention):
    """A kind of `Attention` whose memory of a sequence does not grow with it."""

    __slots__ = ()

    scan_name: ClassVar[str] = "scan"
    """Name of the operator of its recurrence."""
    num_kv_heads = 1
    conv_kernel: int
    """Number of tokens covered by the short convolution; 1 if there is none."""

    @abstractmethod
    def value_width(self, tensor_parallel_size: int = 1) -> int:
        """Returns the elements of a token's output before its projection, on one rank."""

    @abstractmethod
    def conv_width(self, tensor_parallel_size: int = 1) -> int:
        """Returns the number of channels of the short convolution, on one rank; 0: there is none."""

    @property
    def conv_history(self) -> int:
        """Inputs of the convolution that a sequence keeps: its width less 1."""
        return self.conv_kernel - 1

    @abstractmethod
    def recurrent_bytes(self, tensor_parallel_size: int = 1) -> float:
        """Returns the bytes of the recurrent state of one sequence, on one rank."""

    @abstractmethod
    def token_flops(self, tensor_parallel_size: int = 1) -> float:
        """Returns the FLOPs of a token that is processed alone, on one rank."""

    def chunk_token_flops(self, tensor_parallel_size: int = 1) -> float:
        """Returns the FLOPs of a token of a prompt, which is processed in chunks, on one rank."""
        return self.token_flops(tensor_parallel_size)

    def state_bytes(self, dtype: str, tensor_parallel_size: int = 1) -> float:
        """Returns the state bytes of one sequence in one layer on one rank.

        The recurrent state, and the last inputs of the convolution, which are kept in the model's dtype.
        """
        history = self.conv_width(tensor_parallel_size) * self.conv_history
        return self.recurrent_bytes(tensor_parallel_size) + history * KV_BYTES[dtype]


StateDtype = Annotated[str, OneOf(("fp32", "bf16", "fp16"))]
"""Dtype of a recurrent state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadedLayer(RecurrentLayer):
    """A recurrent layer of equal heads, which ranks of tensor parallelism divide."""

    layers: ClassVar[str] = "linear attention"
    """Name of these layers in messages."""

    num_heads: PositiveInt
    head_dim: PositiveInt

    @property
    def num_query_heads(self) -> int:
        return self.num_heads

    @property
    def cutting_rule(self) -> str:
        return f"divide the {self.num_heads} heads of the {self.layers}"

    def heads_per_rank(self, tensor_parallel_size: int = 1) -> int:
        return share_of(self.num_heads, tensor_parallel_size)

    def value_width(self, tensor_parallel_size: int = 1) -> int:
        return self.heads_per_rank(tensor_parallel_size) * self.head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearAttention(RecurrentLayer):
    """Gated delta net: a matrix of constant size per head instead of KV (Yang et al., 2024; Qwen3-Next)."""

    scan_name: ClassVar[str] = "delta_rule"

    num_key_heads: PositiveInt
    key_head_dim: PositiveInt
    num_value_heads: PositiveInt
    value_head_dim: PositiveInt
    conv_kernel: PositiveInt = 4
    """Number of tokens that the short convolution over Q, K and V covers."""
    state_dtype: StateDtype = "fp32"
    """dtype of the recurrent state (`KV_BYTES`); fp32 in the published implementation."""

    def __post_init__(self) -> None:
        check(self)
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"num_key_heads={self.num_key_heads}: must divide num_value_heads={self.num_value_heads}"
            )

    @property
    def num_query_heads(self) -> int:
        return self.num_value_heads

    @property
    def max_tensor_parallel_size(self) -> int:
        return self.num_key_heads

    @property
    def cutting_rule(self) -> str:
        return f"divide the {self.num_key_heads} key heads of the linear attention"

    def key_width(self, tensor_parallel_size: int = 1) -> int:
        return share_of(self.num_key_heads, tensor_parallel_size) * self.key_head_dim

    def value_heads_per_rank(self, tensor_parallel_size: int = 1) -> int:
        return share_of(self.num_value_heads, tensor_parallel_size)

    def value_width(self, tensor_parallel_size: int = 1) -> int:
        return self.value_heads_per_rank(tensor_parallel_size) * self.value_head_dim

    def conv_width(self, tensor_parallel_size: int = 1) -> int:
        """Returns the number of channels of the convolution over Q, K and V."""
        return 2 * self.key_width(tensor_parallel_size) + self.value_width(tensor_parallel_size)

    def matrices(self, hidden_size: int, tensor_parallel_size: int = 1) -> tuple[Matrix, ...]:
        """Returns one rank's matrices: Q, K, V, output gate z; decay and write gates b, a; output."""
        values = self.value_width(tensor_parallel_size)
        gates = 2 * self.value_heads_per_rank(tensor_parallel_size)
        return (
            Matrix("in_proj_qkvz", hidden_size, self.conv_width(tensor_parallel_size) + values),
            Matrix("in_proj_ba", hidden_size, gates, role=Role.plain),
            Matrix("out_proj", values, hidden_size),
        )

    def vector_elements(self, hidden_size: int) -> int:
        """Returns the elements of the convolution, of decay and step per value head, of the output norm."""
        return self.conv_width() * self.conv_kernel + 2 * self.num_value_heads + self.value_head_dim

    def recurrent_bytes(self, tensor_parallel_size: int = 1) -> float:
        """Returns value heads x key_head_dim x value_head_dim elements."""
        heads = self.value_heads_per_rank(tensor_parallel_size)
        return heads * self.key_head_dim * self.value_head_dim * KV_BYTES[self.state_dtype]

    def token_flops(self, tensor_parallel_size: int = 1) -> float:
        """Returns 6 heads d_k d_v: decay, correct, read the state."""
        heads = self.value_heads_per_rank(tensor_parallel_size)
        return 6.0 * heads * self.key_head_dim * self.value_head_dim

    def chunk_token_flops(self, tensor_parallel_size: int = 1) -> float:
        """Returns 2 C heads (2 d_k + d_v) more, for the products among the tokens of a chunk of C."""
        heads = self.value_heads_per_rank(tensor_parallel_size)
        among = 2.0 * SCAN_CHUNK * heads * (2 * self.key_head_dim + self.value_head_dim)
        return self.token_flops(tensor_parallel_size) + among

    def with_fewer_heads(self, share: float) -> Self:
        """Returns the pruned layer; value heads are removed together with their key head."""
        key_heads = kept_heads(self.num_key_heads, share)
        group = self.num_value_heads // self.num_key_heads
        return replace(self, num_key_heads=key_heads, num_value_heads=key_heads * group)


VECTOR_SLOWDOWN = 15
"""Ratio of the tensor cores' bf16 FLOP/s to the vector units' fp32 FLOP/s: 989 / 67 on an H100."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba2(HeadedLayer):
    """Mamba-2: one projection to x, z, B, C and dt, a convolution over x, B and C, a gated norm."""

    layers: ClassVar[str] = "state-space layers"

    state_size: PositiveInt
    num_groups: PositiveInt = 1
    """Groups of heads with a common B and C."""
    conv_kernel: PositiveInt = 4
    proj_bias: bool = False
    conv_bias: bool = True
    norm: bool = True
    """Gated norm before the output projection (Falcon-H1: none)."""
    state_dtype: StateDtype = "fp32"

    scan_name: ClassVar[str] = "state_space_scan"

    def __post_init__(self) -> None:
        check(self)
        if self.num_heads % self.num_groups:
            raise ValueError(f"num_groups={self.num_groups}: must divide num_heads={self.num_heads}")

    def groups_per_rank(self, tensor_parallel_size: int = 1) -> int:
        """Returns the groups of a rank; they are replicated if there are fewer than ranks."""
        return max(1, self.num_groups // tensor_parallel_size)

    def conv_width(self, tensor_parallel_size: int = 1) -> int:
        groups = self.groups_per_rank(tensor_parallel_size)
        return self.value_width(tensor_parallel_size) + 2 * groups * self.state_size

    def matrices(self, hidden_size: int, tensor_parallel_size: int = 1) -> tuple[Matrix, ...]:
        """Returns one rank's matrices: x, B, C, z and dt; output."""
        values, heads = self.value_width(tensor_parallel_size), self.heads_per_rank(tensor_parallel_size)
        return (
            Matrix("in_proj", hidden_size, self.conv_width(tensor_parallel_size) + values + heads),
            Matrix("out_proj", values, hidden_size),
        )

    def vector_elements(self, hidden_size: int) -> int:
        """Returns the elements of the convolution, of A, D and the bias of dt per head, norm and biases."""
        width, values = self.conv_width(), self.value_width()
        biases = self.proj_bias * (width + values + self.num_heads + hidden_size)
        convolution = width * (self.conv_kernel + self.conv_bias)
        return convolution + 3 * self.num_heads + self.norm * values + biases

    def recurrent_bytes(self, tensor_parallel_size: int = 1) -> float:
        """Returns heads x head_dim x state_size elements."""
        return self.value_width(tensor_parallel_size) * self.state_size * KV_BYTES[self.state_dtype]

    def token_flops(self, tensor_parallel_size: int = 1) -> float:
        """Returns 5 heads head_dim state_size: decay, add the input's outer product, read the state."""
        return 5.0 * self.value_width(tensor_parallel_size) * self.state_size

    def chunk_token_flops(self, tensor_parallel_size: int = 1) -> float:
        """Returns, in chunks of C: 4 heads p n for the state, 2 C (heads p + groups n) among the tokens."""
        values, groups = self.value_width(tensor_parallel_size), self.groups_per_rank(tensor_parallel_size)
        return 4.0 * values * self.state_size + 2.0 * SCAN_CHUNK * (values + groups * self.state_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba1(RecurrentLayer):
    """Mamba-1: every one of d_inner channels has its own state, scanned token by token."""

    inner_size: PositiveInt
    state_size: PositiveInt
    dt_rank: PositiveInt
    conv_kernel: PositiveInt = 4
    proj_bias: bool = False
    conv_bias: bool = True
    norms: bool = False
    """Norms of dt, B and C (Jamba, Falcon-Mamba)."""
    state_dtype: StateDtype = "fp32"

    scan_name: ClassVar[str] = "state_space_scan"

    @property
    def num_query_heads(self) -> int:
        return self.inner_size

    @property
    def cutting_rule(self) -> str:
        return f"divide the {self.inner_size} channels of the state-space layers"

    def value_width(self, tensor_parallel_size: int = 1) -> int:
        return share_of(self.inner_size, tensor_parallel_size)

    def conv_width(self, tensor_parallel_size: int = 1) -> int:
        return self.value_width(tensor_parallel_size)

    def matrices(self, hidden_size: int, tensor_parallel_size: int = 1) -> tuple[Matrix, ...]:
        """Returns one rank's matrices: x and z; dt's low rank, B and C; dt; output."""
        inner = self.value_width(tensor_parallel_size)
        return (
            Matrix("in_proj", hidden_size, 2 * inner),
            Matrix("x_proj", inner, self.dt_rank + 2 * self.state_size),
            Matrix("dt_proj", self.dt_rank, inner),
            Matrix("out_proj", inner, hidden_size),
        )

    def vector_elements(self, hidden_size: int) -> int:
        """Returns the elements of the convolution, of A, of D and the bias of dt, norms and biases."""
        convolution = self.inner_size * (self.conv_kernel + self.conv_bias)
        biases = self.proj_bias * (2 * self.inner_size + hidden_size)
        norms = self.norms * (self.dt_rank + 2 * self.state_size)
        return convolution + self.inner_size * (self.state_size + 2) + norms + biases

    def recurrent_bytes(self, tensor_parallel_size: int = 1) -> float:
        return self.value_width(tensor_parallel_size) * self.state_size * KV_BYTES[self.state_dtype]

    def token_flops(self, tensor_parallel_size: int = 1) -> float:
        """Returns 9 d_inner d_state vector-unit operations, as equivalent FLOPs of the tensor cores."""
        return 9.0 * VECTOR_SLOWDOWN * self.value_width(tensor_parallel_size) * self.state_size


@dataclass(frozen=True, kw_only=True, slots=True)
class KimiDeltaAttention(HeadedLayer):
    """Kimi delta attention: a gated delta net with a decay per channel, and equal widths of Q, K and V."""

    conv_kernel: PositiveInt = 4
    full_rank_gate: bool = False
    """Whether the output gate is one matrix (Kimi-K3); if not, it has rank head_dim."""
    full_rank_decay: bool = False
    """Whether the decay is computed by one matrix (Ling 3); if not, it has rank head_dim."""

    scan_name: ClassVar[str] = "delta_rule"

    def conv_width(self, tensor_parallel_size: int = 1) -> int:
        return 3 * self.value_width(tensor_parallel_size)

    def matrices(self, hidden_size: int, tensor_parallel_size: int = 1) -> tuple[Matrix, ...]:
        """Returns one rank's matrices: Q, K, V; write gate; decay's and output gate's one or two; output."""
        width, rank = self.value_width(tensor_parallel_size), self.head_dim
        heads = self.heads_per_rank(tensor_parallel_size)
        gate = (
            (Matrix("gate_proj", hidden_size, width),)
            if self.full_rank_gate
            else (Matrix("gate_a_proj", hidden_size, rank), Matrix("gate_b_proj", rank, width))
        )
        decay = (
            (Matrix("decay_proj", hidden_size, width),)
            if self.full_rank_decay
            else (Matrix("decay_a_proj", hidden_size, rank), Matrix("decay_b_proj", rank, width))
        )
        return (
            Matrix("in_proj_qkv", hidden_size, 3 * width),
            Matrix("in_proj_b", hidden_size, heads, role=Role.plain),
            *decay,
            *gate,
            Matrix("out_proj", width, hidden_size),
        )

    def vector_elements(self, hidden_size: int) -> int:
        """Returns the elements of the convolution, of the decay and its bias, of the output norm."""
        width = self.value_width()
        return self.conv_width() * self.conv_kernel + self.num_heads + width + self.head_dim

    def recurrent_bytes(self, tensor_parallel_size: int = 1) -> float:
        """Returns heads x head_dim x head_dim elements in fp32."""
        return self.value_width(tensor_parallel_size) * self.head_dim * KV_BYTES["fp32"]

    def token_flops(self, tensor_parallel_size: int = 1) -> float:
        """Returns 6 heads d d, like a gated delta net."""
        return 6.0 * self.value_width(tensor_parallel_size) * self.head_dim

    def chunk_token_flops(self, tensor_parallel_size: int = 1) -> float:
        among = 2.0 * SCAN_CHUNK * 3 * self.value_width(tensor_parallel_size)
        return self.token_flops(tensor_parallel_size) + among


@dataclass(frozen=True, kw_only=True, slots=True)
class LightningAttention(HeadedLayer):
    """Lightning attention: a matrix per head that decays at a fixed rate, with a gate on the output."""

    state_dtype: StateDtype = "bf16"
    """dtype of the state; vLLM uses the model's dtype."""

    scan_name: ClassVar[str] = "linear_scan"
    conv_kernel = 1

    def conv_width(self, tensor_parallel_size: int = 1) -> int:
        return 0

    def matrices(self, hidden_size: int, tensor_parallel_size: int = 1) -> tuple[Matrix, ...]:
        """Returns one rank's matrices: Q, K, V; gate; output."""
        width = self.value_width(tensor_parallel_size)
        return (
            Matrix("qkv_proj", hidden_size, 3 * width),
            Matrix("gate_proj", hidden_size, width),
            Matrix("out_proj", width, hidden_size),
        )

    def vector_elements(self, hidden_size: int) -> int:
        """Returns the elements of the output norm."""
        return self.value_width()

    def recurrent_bytes(self, tensor_parallel_size: int = 1) -> float:
        """Returns heads x head_dim x head_dim elements."""
        return self.value_width(tensor_parallel_size) * self.head_dim * KV_BYTES[self.state_dtype]

    def token_flops(self, tensor_parallel_size: int = 1) -> float:
        """Returns 5 heads d d: decay, add the outer product of key and value, read the state."""
        return 5.0 * self.value_width(tensor_parallel_size) * self.head_dim

    def chunk_token_flops(self, tensor_parallel_size: int = 1) -> float:
        """Returns 4 heads d d for the state, 4 C heads d for the products among a chunk's tokens."""
        width = self.value_width(tensor_parallel_size)
        return 4.0 * width * self.head_dim + 4.0 * SCAN_CHUNK * width


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortConvolution(RecurrentLayer):
    """Gated short convolution: B, C and x from one projection, B x through the convolution, times C."""

    width: PositiveInt
    """Channels: the hidden size."""
    conv_kernel: PositiveInt = 3
    bias: bool = False

    scan_name: ClassVar[str] = "short_convolution"

    @property
    def num_query_heads(self) -> int:
        return self.width

    @property
    def cutting_rule(self) -> str:
        return f"divide the {self.width} channels of the convolution"

    def value_width(self, tensor_parallel_size: int = 1) -> int:
        return share_of(self.width, tensor_parallel_size)

    def conv_width(self, tensor_parallel_size: int = 1) -> int:
        return self.value_width(tensor_parallel_size)

    def matrices(self, hidden_size: int, tensor_parallel_size: int = 1) -> tuple[Matrix, ...]:
        width = self.value_width(tensor_parallel_size)
        return (Matrix("in_proj", hidden_size, 3 * width), Matrix("out_proj", width, hidden_size))

    def vector_elements(self, hidden_size: int) -> int:
        return self.width * (self.conv_kernel + self.bias) + self.bias * 4 * self.width

    def recurrent_bytes(self, tensor_parallel_size: int = 1) -> float:
        return 0.0

    def token_flops(self, tensor_parallel_size: int = 1) -> float:
        """Returns 2 (kernel + 1) width vector-unit operations, as equivalent FLOPs of the tensor cores."""
        return 2.0 * VECTOR_SLOWDOWN * (self.conv_kernel + 1) * self.value_width(tensor_parallel_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class BesideAttention(Attention):
    """Softmax attention and a recurrent layer in parallel in one layer; their outputs are summed."""

    attention: GroupedQueryAttention
    recurrent: RecurrentLayer

    @property
    def window(self) -> int | None:  # type: ignore[override]
        return self.attention.window

    @property
    def num_kv_heads(self) -> int:  # type: ignore[override]
        return self.attention.num_kv_heads

    @property
    def num_query_heads(self) -> int:
        return self.attention.num_query_heads

    @property
    def max_tensor_parallel_size(self) -> int:
        return min(self.attention.max_tensor_parallel_size, self.recurrent.max_tensor_parallel_size)

    @property
    def cutting_rule(self) -> str:
        return f"{self.attention.cutting_rule}; {self.recurrent.cutting_rule}"

    def divides(self, tensor_parallel_size: int) -> bool:
        return self.attention.divides(tensor_parallel_size) and self.recurrent.divides(tensor_parallel_size)

    def matrices(self, hidden_size: int, tensor_parallel_size: int = 1) -> tuple[Matrix, ...]:
        of_attention = self.attention.matrices(hidden_size, tensor_parallel_size)
        return (*of_attention, *self.recurrent.matrices(hidden_size, tensor_parallel_size))

    def vector_elements(self, hidden_size: int) -> int:
        return self.attention.vector_elements(hidden_size) + self.recurrent.vector_elements(hidden_size)

    def kv_bytes_per_token(self, kv_dtype: str, tensor_parallel_size: int = 1) -> float:
        return self.attention.kv_bytes_per_token(kv_dtype, tensor_parallel_size)

    def state_bytes(self, dtype: str, tensor_parallel_size: int = 1) -> float:
        return self.recurrent.state_bytes(dtype, tensor_parallel_size)

    def least_pair_flops(self, tensor_parallel_size: int = 1) -> float:
        return self.attention.least_pair_flops(tensor_parallel_size)

    def with_fewer_heads(self, share: float) -> Self:
        raise ValueError(f"heads={share}: layers with two mixers cannot be pruned by heads; must be 1")
