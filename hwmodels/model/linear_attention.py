"""Layers with a state of constant size per sequence in place of KV per token; linear attention is one kind.

`RecurrentLayer` is what they have in common; a kind states its matrices, its convolution, its state and the
FLOPs of its recurrence. State-space layers are in `hwmodels.model.state_space`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

from fieldlimits import OneOf, PositiveInt, check
from hwmodels.model.attention import Attention, kept_heads
from hwmodels.model.matrices import Matrix, Role, share_of
from hwmodels.model.quantization import KV_BYTES

SCAN_CHUNK = 64
"""Tokens that the chunked form of a recurrence processes at once (Yang et al., 2024)."""


class RecurrentLayer(Attention):
    """A kind of `Attention` whose memory of a sequence does not grow with it."""

    __slots__ = ()

    scan_name: ClassVar[str] = "scan"
    """Name of the operator of its recurrence."""
    num_kv_heads = 1
    conv_kernel: int
    """Tokens that the short convolution covers; 1 where there is none."""

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
